//! Numbers as people read them: as many digits as the largest of a table needs, so that columns line up.

/// How the numbers of one table are written.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Digits {
    /// That many behind the point.
    Decimals(usize),
    /// Very large or very small: powers of ten.
    Scientific,
}

impl Digits {
    /// Four digits for the largest of `values`.
    pub(super) fn for_values(values: impl Iterator<Item = f64>) -> Self {
        let largest = values.map(f64::abs).fold(0.0, f64::max);
        match largest {
            0.0 => Self::Decimals(3),
            largest if (1e-3..1e9).contains(&largest) => {
                Self::Decimals((3.0 - largest.log10().floor()).clamp(0.0, 6.0) as usize)
            }
            _ => Self::Scientific,
        }
    }

    /// A number.
    pub(super) fn plain(self, value: f64) -> String {
        self.number(value, "")
    }

    /// A difference, with its sign.
    pub(super) fn signed(self, value: f64) -> String {
        self.number(value, if value > 0.0 { "+" } else { "" })
    }

    fn number(self, value: f64, sign: &str) -> String {
        let text = match self {
            Self::Decimals(decimals) => format!("{sign}{value:.decimals$}"),
            Self::Scientific => format!("{sign}{value:.3e}"),
        };
        // "-0.000" and "+0.000" would claim a direction that is not there.
        if text.bytes().any(|byte| (b'1'..=b'9').contains(&byte)) { text } else { text.replace(['+', '-'], "") }
    }
}

/// What stands where there is no number.
pub(super) const NONE: &str = "-";

/// A number, or a dash.
pub(super) fn or_dash(value: Option<f64>, format: impl Fn(f64) -> String) -> String {
    value.map_or_else(|| NONE.to_owned(), format)
}

/// `12 (40.0 %)`.
pub(super) fn counted(n: u64, of: u64) -> String {
    if of == 0 { n.to_string() } else { format!("{n} ({:.1} %)", 100.0 * n as f64 / of as f64) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_largest_has_four_digits_and_zero_no_sign() {
        let digits = Digits::for_values([0.25, -1.0].into_iter());
        assert_eq!(
            (digits.plain(-0.25), digits.signed(0.25), digits.signed(-1e-7)),
            ("-0.250".into(), "+0.250".into(), "0.000".into())
        );
        assert_eq!(Digits::for_values([123.4].into_iter()).plain(123.4), "123.4");
        assert_eq!(Digits::for_values([1e-12].into_iter()).signed(1e-12), "+1.000e-12");
        assert_eq!(Digits::for_values(std::iter::empty()).plain(0.0), "0.000");
    }
}
