//! Conversion between Python objects and records.

use pyo3::exceptions::{PyTypeError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::iter::BoundDictIterator;
use pyo3::types::{PyBool, PyDict, PyFloat, PyInt, PyList, PyString, PyTuple};
use pythonize::{depythonize, pythonize};
use serde::Serialize;
use serde::de::value::{Error, MapAccessDeserializer};
use serde::de::{
    DeserializeOwned, DeserializeSeed, Deserializer, Error as _, IntoDeserializer, MapAccess, SeqAccess, Visitor,
};
use serde::forward_to_deserialize_any;

/// Converts a list of Python objects to records; `check` completes and checks each record, given its index.
///
/// # Errors
/// An element is not such a record, or has a number that is NaN or Inf: `name[index]`, and what is wrong with it.
pub(crate) fn records<T: DeserializeOwned>(
    list: &Bound<'_, PyList>,
    name: &str,
    check: impl Fn(&mut T, usize) -> Result<(), String>,
) -> PyResult<Vec<T>> {
    let record = |(index, item): (usize, Bound<'_, PyAny>)| {
        let wrong = |problem: String| format!("{name}[{index}]: {problem}");
        let object = Object { value: &item, depth: MAX_DEPTH };
        let mut record = T::deserialize(object).map_err(|error| PyTypeError::new_err(wrong(error.to_string())))?;
        check(&mut record, index).map_err(|problem| PyValueError::new_err(wrong(problem)))?;
        Ok(record)
    };
    list.iter().enumerate().map(record).collect()
}

/// Dictionaries and lists within each other: more than any record has. Python's may contain themselves.
const MAX_DEPTH: u32 = 32;

/// An object of dictionaries, lists, texts, numbers, booleans and None, as serde reads it. pythonize takes several times as long for an episode,
/// since it copies the keys and values of each dictionary to lists, and passes on NaN and Inf, which become null where a record has any JSON.
#[derive(Clone, Copy)]
struct Object<'a, 'py> {
    value: &'a Bound<'py, PyAny>,
    /// Levels that may follow.
    depth: u32,
}

impl<'a, 'py> Object<'a, 'py> {
    fn deeper(self) -> Result<u32, Error> {
        self.depth.checked_sub(1).ok_or_else(|| Error::custom("dictionaries and lists are too deep within each other"))
    }

    fn entries(self, dict: &'a Bound<'py, PyDict>) -> Result<Entries<'py>, Error> {
        Ok(Entries { entries: dict.iter(), value: None, depth: self.deeper()? })
    }

    fn unexpected(self, expected: &str) -> Error {
        let name = self.value.get_type().name().map_or_else(|_| "an object".to_owned(), |name| name.to_string());
        Error::custom(format!("{name}; expected {expected}"))
    }
}

impl<'de> Deserializer<'de> for Object<'_, '_> {
    type Error = Error;

    fn deserialize_any<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Error> {
        let value = self.value;
        if let Ok(text) = value.cast::<PyString>() {
            visitor.visit_str(text.to_str().map_err(Error::custom)?)
        } else if let Ok(dict) = value.cast::<PyDict>() {
            visitor.visit_map(self.entries(dict)?)
        } else if let Ok(list) = value.cast::<PyList>() {
            visitor.visit_seq(Items { items: list.iter(), depth: self.deeper()? })
        } else if let Ok(number) = value.cast::<PyFloat>() {
            match number.value() {
                number if number.is_finite() => visitor.visit_f64(number),
                number => Err(Error::custom(format!("{number}; expected a finite number"))),
            }
        } else if let Ok(flag) = value.cast::<PyBool>() {
            visitor.visit_bool(flag.is_true()) // before numbers: Python's bool is an int
        } else if let Ok(number) = value.cast::<PyInt>() {
            match number.extract::<i64>() {
                Ok(number) => visitor.visit_i64(number),
                Err(_) => visitor.visit_u64(number.extract().map_err(|_| self.unexpected("a number of 64 bits"))?),
            }
        } else if value.is_none() {
            visitor.visit_unit()
        } else if let Ok(tuple) = value.cast::<PyTuple>() {
            visitor.visit_seq(Items { items: tuple.iter(), depth: self.deeper()? })
        } else {
            Err(self.unexpected("a text, a number, true, false, None, a list or a dictionary"))
        }
    }

    fn deserialize_option<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Error> {
        if self.value.is_none() { visitor.visit_none() } else { visitor.visit_some(self) }
    }

    fn deserialize_newtype_struct<V: Visitor<'de>>(self, _: &'static str, visitor: V) -> Result<V::Value, Error> {
        visitor.visit_newtype_struct(self)
    }

    fn deserialize_struct<V: Visitor<'de>>(
        self,
        _: &'static str,
        _: &'static [&'static str],
        visitor: V,
    ) -> Result<V::Value, Error> {
        let dict = self.value.cast::<PyDict>().map_err(|_| self.unexpected("a dictionary"))?;
        visitor.visit_map(self.entries(dict)?)
    }

    fn deserialize_enum<V: Visitor<'de>>(
        self,
        _: &'static str,
        _: &'static [&'static str],
        visitor: V,
    ) -> Result<V::Value, Error> {
        if let Ok(text) = self.value.cast::<PyString>() {
            return visitor.visit_enum(text.to_str().map_err(Error::custom)?.into_deserializer());
        }
        match self.value.cast::<PyDict>() {
            Ok(dict) if dict.len() == 1 => visitor.visit_enum(MapAccessDeserializer::new(self.entries(dict)?)),
            _ => Err(self.unexpected("a text or a dictionary with one entry")),
        }
    }

    forward_to_deserialize_any! {
        bool i8 i16 i32 i64 i128 u8 u16 u32 u64 u128 f32 f64 char str string bytes byte_buf unit unit_struct seq tuple tuple_struct map
        identifier ignored_any
    }
}

struct Entries<'py> {
    entries: BoundDictIterator<'py>,
    /// Of the key that was read last.
    value: Option<Bound<'py, PyAny>>,
    depth: u32,
}

impl<'de> MapAccess<'de> for Entries<'_> {
    type Error = Error;

    fn next_key_seed<K: DeserializeSeed<'de>>(&mut self, seed: K) -> Result<Option<K::Value>, Error> {
        let Some((key, value)) = self.entries.next() else { return Ok(None) };
        self.value = Some(value);
        seed.deserialize(Object { value: &key, depth: self.depth }).map(Some)
    }

    fn next_value_seed<V: DeserializeSeed<'de>>(&mut self, seed: V) -> Result<V::Value, Error> {
        let value = self.value.take().ok_or_else(|| Error::custom("a value without a key"))?;
        seed.deserialize(Object { value: &value, depth: self.depth })
    }
}

struct Items<I> {
    items: I,
    depth: u32,
}

impl<'de, 'py, I: Iterator<Item = Bound<'py, PyAny>>> SeqAccess<'de> for Items<I> {
    type Error = Error;

    fn next_element_seed<T: DeserializeSeed<'de>>(&mut self, seed: T) -> Result<Option<T::Value>, Error> {
        let Some(item) = self.items.next() else { return Ok(None) };
        seed.deserialize(Object { value: &item, depth: self.depth }).map(Some)
    }
}

/// Deserialises the value of a keyword argument; the default of `T` if it is `None`.
pub(crate) fn argument<T: DeserializeOwned + Default>(value: Option<&Bound<'_, PyAny>>, name: &str) -> PyResult<T> {
    let Some(value) = value.filter(|value| !value.is_none()) else { return Ok(T::default()) };
    depythonize(value).map_err(|error| PyTypeError::new_err(format!("{name}: {error}")))
}

pub(crate) fn to_python(py: Python<'_>, value: &impl Serialize) -> PyResult<Py<PyAny>> {
    Ok(pythonize(py, value)?.unbind())
}
