//! The file format GGUF, version 3: metadata, then the tensors' descriptions, then their bytes. Tensors are written one after another, so
//! that memory holds one of them.
//!
//! Source: `docs/gguf.md` of ggml.

use std::io::{self, Write};

const VERSION: u32 = 3;
/// Alignment of tensors in bytes: GGUF's default of `general.alignment`.
const ALIGNMENT: u64 = 32;

#[derive(Debug, Clone, PartialEq)]
pub(super) enum MetadataValue {
    U32(u32),
    F32(f32),
    Bool(bool),
    Text(String),
    I32s(Vec<i32>),
    Texts(Vec<String>),
}

impl MetadataValue {
    const ARRAY: u32 = 9;
    const I32: u32 = 5;
    const STRING: u32 = 8;

    fn kind(&self) -> u32 {
        match self {
            Self::U32(_) => 4,
            Self::F32(_) => 6,
            Self::Bool(_) => 7,
            Self::Text(_) => Self::STRING,
            Self::I32s(_) | Self::Texts(_) => Self::ARRAY,
        }
    }

    fn write(&self, to: &mut impl Write) -> io::Result<()> {
        match self {
            Self::U32(number) => to.write_all(&number.to_le_bytes()),
            Self::F32(number) => to.write_all(&number.to_le_bytes()),
            Self::Bool(flag) => to.write_all(&[u8::from(*flag)]),
            Self::Text(text) => write_text(to, text),
            Self::I32s(numbers) => {
                write_array_head(to, Self::I32, numbers.len())?;
                numbers.iter().try_for_each(|number| to.write_all(&number.to_le_bytes()))
            }
            Self::Texts(texts) => {
                write_array_head(to, Self::STRING, texts.len())?;
                texts.iter().try_for_each(|text| write_text(to, text))
            }
        }
    }
}

fn write_array_head(to: &mut impl Write, kind: u32, len: usize) -> io::Result<()> {
    to.write_all(&kind.to_le_bytes())?;
    to.write_all(&(len as u64).to_le_bytes())
}

fn write_text(to: &mut impl Write, text: &str) -> io::Result<()> {
    to.write_all(&(text.len() as u64).to_le_bytes())?;
    to.write_all(text.as_bytes())
}

querl_core::named_enum! {
    /// Type of the matrices in a GGUF file. Norms and biases are f32.
    #[derive(Debug, Clone, Copy, PartialEq, Eq)]
    pub enum GgufDtype {
        /// `f32`.
        F32 = "f32",
        /// `f16`.
        F16 = "f16",
        /// `bf16`.
        Bf16 = "bf16",
        /// Blocks of 32 8-bit integers with an f16 scale; f16 for rows whose length is not a multiple of 32.
        Q8_0 = "q8_0",
    }
}

/// Number of values in a block of [`GgufDtype::Q8_0`].
const BLOCK: usize = 32;

impl GgufDtype {
    /// Value of `general.file_type`.
    pub(super) fn file_type(self) -> u32 {
        match self {
            Self::F32 => 0,
            Self::F16 => 1,
            Self::Q8_0 => 7,
            Self::Bf16 => 32,
        }
    }

    /// Type of a matrix of this shape in a file of this type.
    pub(super) fn of_matrix(self, shape: &[usize]) -> Self {
        match self {
            Self::Q8_0 if shape.last().is_none_or(|n_columns| n_columns % BLOCK != 0) => Self::F16,
            dtype => dtype,
        }
    }

    /// The number of the tensor type in ggml.
    fn id(self) -> u32 {
        match self {
            Self::F32 => 0,
            Self::F16 => 1,
            Self::Q8_0 => 8,
            Self::Bf16 => 30,
        }
    }

    fn n_bytes(self, n_values: usize) -> u64 {
        let n_values = n_values as u64;
        match self {
            Self::F32 => n_values * 4,
            Self::F16 | Self::Bf16 => n_values * 2,
            Self::Q8_0 => n_values / BLOCK as u64 * (BLOCK as u64 + 2),
        }
    }
}

/// Name, shape (as in PyTorch: rows first) and type of a tensor.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct TensorInfo {
    pub(super) name: String,
    pub(super) shape: Vec<usize>,
    pub(super) dtype: GgufDtype,
}

impl TensorInfo {
    pub(super) fn n_bytes(&self) -> u64 {
        self.dtype.n_bytes(self.shape.iter().product())
    }
}

/// Writes the header: everything before the bytes of the tensors.
pub(super) fn write_head(
    to: &mut impl Write,
    metadata: &[(String, MetadataValue)],
    tensors: &[TensorInfo],
) -> io::Result<()> {
    let mut head = Vec::new();
    head.write_all(b"GGUF")?;
    head.write_all(&VERSION.to_le_bytes())?;
    head.write_all(&(tensors.len() as u64).to_le_bytes())?;
    head.write_all(&(metadata.len() as u64).to_le_bytes())?;
    for (key, value) in metadata {
        write_text(&mut head, key)?;
        head.write_all(&value.kind().to_le_bytes())?;
        value.write(&mut head)?;
    }
    let mut offset = 0u64;
    for tensor in tensors {
        write_text(&mut head, &tensor.name)?;
        head.write_all(&(tensor.shape.len() as u32).to_le_bytes())?;
        // GGUF has the fastest dimension first.
        tensor.shape.iter().rev().try_for_each(|size| head.write_all(&(*size as u64).to_le_bytes()))?;
        head.write_all(&tensor.dtype.id().to_le_bytes())?;
        head.write_all(&offset.to_le_bytes())?;
        offset += padded(tensor.n_bytes());
    }
    to.write_all(&head)?;
    pad(to, head.len() as u64)
}

pub(super) fn write_tensor(to: &mut impl Write, bytes: &[u8]) -> io::Result<()> {
    to.write_all(bytes)?;
    pad(to, bytes.len() as u64)
}

fn padded(n_bytes: u64) -> u64 {
    n_bytes.next_multiple_of(ALIGNMENT)
}

fn pad(to: &mut impl Write, n_bytes: u64) -> io::Result<()> {
    to.write_all(&[0; ALIGNMENT as usize][..(padded(n_bytes) - n_bytes) as usize])
}
