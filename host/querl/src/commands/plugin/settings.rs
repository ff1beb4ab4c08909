//! Settings of a plugin on the command line.

use querl_pipeline::failure::Stop;
use querl_plugin::PluginSettings;

/// `KEY=VALUE`, the value as in TOML; what is not TOML is a text. `flag` is what messages call the option.
pub fn parse(assignments: &[String], flag: &str) -> Result<PluginSettings, Stop> {
    let mut settings = PluginSettings::new();
    for text in assignments {
        let (key, value) = text.split_once('=').filter(|(key, _)| !key.trim().is_empty()).ok_or_else(|| {
            Stop::usage(format!("{flag} `{text}`: expected KEY=VALUE, for example `{flag} max_chars=40`"))
        })?;
        if settings.insert(key.trim().to_owned(), value_of(value.trim())).is_some() {
            return Err(Stop::usage(format!("{flag}: `{}` is given twice; expected once", key.trim())));
        }
    }
    Ok(settings)
}

fn value_of(text: &str) -> toml::Value {
    // More than one key would mean that the text holds a line break and a key of its own.
    let table = toml::from_str::<toml::Table>(&format!("value = {text}")).ok().filter(|table| table.len() == 1);
    table.and_then(|mut table| table.remove("value")).unwrap_or_else(|| toml::Value::String(text.to_owned()))
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn values_are_toml_or_texts() {
        let texts = ["a=40", "b=短", "c=['x', 'y']", "d = 0.5", "e=x=y", "f=1\ng = 2"].map(str::to_owned);
        let settings = parse(&texts, "--settings").unwrap();
        let shown: Vec<_> = settings.values().map(ToString::to_string).collect();
        assert_eq!(shown, ["40", "\"短\"", "[\"x\", \"y\"]", "0.5", "\"x=y\"", "\"\"\"\n1\ng = 2\"\"\""]);
        for bad in ["a", "=1"] {
            assert!(parse(&[bad.to_owned()], "--settings").unwrap_err().to_string().contains("expected KEY=VALUE"));
        }
        let twice = ["a=1".to_owned(), "a=2".to_owned()];
        assert_eq!(
            parse(&twice, "--settings").unwrap_err().to_string(),
            "--settings: `a` is given twice; expected once"
        );
    }
}
