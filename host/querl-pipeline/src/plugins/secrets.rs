//! A secret never reaches a plugin: settings that hold the value of a key are refused.

use crate::failure::Stop;
use querl_core::config::Config;
use toml::Value;

/// A shorter value stands in many texts that have nothing to do with it; it counts where it is the whole setting.
const SHORTEST_PART_CHARS: usize = 8;

/// Looks through the settings of every plugin for the values of the environment variables that hold keys.
pub(super) fn check(config: &Config) -> Result<(), Stop> {
    let variables = [&config.teacher.api_key_env, &config.judge.api_key_env];
    let secrets: Vec<(&str, String)> = variables
        .into_iter()
        .filter_map(|name| Some((name.as_str(), std::env::var(name).ok()?.trim().to_owned())))
        .filter(|(_, value)| !value.is_empty())
        .collect();
    let plugins = &config.plugins;
    let prompt = [("plugins.prompt".to_owned(), &plugins.prompt.settings)];
    let of_filter = |(index, filter)| (format!("plugins.filters[{index}]"), filter);
    let of_reward = |(index, reward)| (format!("plugins.rewards[{index}]"), reward);
    let filters = plugins.filters.iter().map(|filter| &filter.settings).enumerate().map(of_filter);
    let rewards = plugins.rewards.iter().map(|reward| &reward.settings).enumerate().map(of_reward);
    for (place, settings) in prompt.into_iter().chain(filters).chain(rewards) {
        for (key, value) in settings {
            if let Some((variable, _)) = secrets.iter().find(|(_, secret)| holds(value, secret)) {
                return Err(Stop::usage(format!(
                    "{place}.settings.{key} holds the value of the environment variable {variable}; a secret must not \
                     reach a plugin, so take it out"
                )));
            }
        }
    }
    Ok(())
}

fn holds(value: &Value, secret: &str) -> bool {
    let is_in = |text: &str| match secret.chars().count() < SHORTEST_PART_CHARS {
        true => text.trim() == secret,
        false => text.contains(secret),
    };
    match value {
        Value::String(text) => is_in(text),
        Value::Array(items) => items.iter().any(|item| holds(item, secret)),
        Value::Table(table) => table.iter().any(|(key, item)| is_in(key) || holds(item, secret)),
        number => is_in(&number.to_string()),
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn a_secret_is_found_wherever_it_stands() {
        let found = |setting: &str, secret: &str| {
            let table: toml::Table = setting.parse().unwrap();
            holds(&table["s"], secret)
        };
        assert!(found("s = 'Bearer sk-1234567'", "sk-1234567"));
        assert!(found("s = ['a', { b = 'sk-1234567' }]", "sk-1234567"));
        assert!(found("s = { sk-1234567 = 1 }", "sk-1234567"));
        assert!(found("s = 123456789", "123456789"));
        assert!(!found("s = '糖'", "sk-1234567"));
    }

    #[test]
    fn a_short_value_counts_where_it_is_the_whole_setting() {
        let text = |text: &str| Value::String(text.into());
        assert!(holds(&text(" none "), "none") && !holds(&text("none of these"), "none"));
    }
}
