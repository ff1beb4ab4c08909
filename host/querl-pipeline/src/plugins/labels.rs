//! Names for several rewards that may be the same plugin with other settings.

/// The ids themselves where each is there once. An id that comes again is numbered from its second place on, in the order of
/// the configuration: `reward-brevity`, `reward-brevity#2`. No id has a `#`, so that no name comes twice.
pub(super) fn distinct(ids: &[&str]) -> Vec<String> {
    let label = |(index, id): (usize, &&str)| match ids[..index].iter().filter(|earlier| *earlier == id).count() {
        0 => (*id).to_owned(),
        n_earlier => format!("{id}#{}", n_earlier + 1),
    };
    ids.iter().enumerate().map(label).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_plugin_that_is_used_twice_has_two_names() {
        assert_eq!(distinct(&["a", "b", "a", "a"]), ["a", "b", "a#2", "a#3"]);
    }
}
