//! Credentials for registries.

use super::client::RegistryError;
use super::reference::RegistryReference;
use docker_credential::{CredentialRetrievalError, DockerCredential};
use oci_client::secrets::RegistryAuth;

const VARIABLES: [&str; 3] = ["QUERL_REGISTRY_HOST", "QUERL_REGISTRY_USER", "QUERL_REGISTRY_PASSWORD"];

/// Credentials for a registry. No message and no `Debug` output shows the password.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Credentials(RegistryAuth);

impl Credentials {
    /// No credentials, for public repositories.
    pub fn anonymous() -> Self {
        Self(RegistryAuth::Anonymous)
    }

    /// A user with a password or an access token.
    pub fn basic(user: &str, password: &str) -> Self {
        Self(RegistryAuth::Basic(user.to_owned(), password.to_owned()))
    }

    /// Credentials from the environment variables `QUERL_REGISTRY_USER` and `QUERL_REGISTRY_PASSWORD` if `QUERL_REGISTRY_HOST` is the host
    /// of `location` (with its port, if any); else those that `docker login` keeps for the registry in `~/.docker/config.json` (or in the
    /// folder `DOCKER_CONFIG`) or its credential helper; else anonymous.
    ///
    /// # Errors
    /// One variable is set without the others, or docker's credentials are not a user with a password.
    pub fn find(location: &RegistryReference) -> Result<Self, RegistryError> {
        let variables = VARIABLES.map(|name| std::env::var(name).ok().filter(|value| !value.is_empty()));
        match of_variables(location, variables)? {
            Some(credentials) => Ok(credentials),
            None => of_docker(location, docker_credential::get_credential(location.host())),
        }
    }

    pub(crate) fn auth(&self) -> &RegistryAuth {
        &self.0
    }

    pub(crate) fn is_anonymous(&self) -> bool {
        self.0 == RegistryAuth::Anonymous
    }
}

/// The credentials in the values of [`VARIABLES`]; `None` if they are unset or for another host.
fn of_variables(
    location: &RegistryReference,
    variables: [Option<String>; 3],
) -> Result<Option<Credentials>, RegistryError> {
    match &variables {
        [None, None, None] => Ok(None),
        [Some(host), Some(user), Some(password)] => {
            Ok(host.eq_ignore_ascii_case(location.host()).then(|| Credentials::basic(user, password)))
        }
        some => {
            let missing = VARIABLES.iter().zip(some).find(|(_, value)| value.is_none()).map_or("", |(name, _)| name);
            let [host, user, password] = VARIABLES;
            let message = format!(
                "{missing} is not set; set {host}, {user} and {password} (they are sent to that host alone), or none of them"
            );
            Err(RegistryError::at(location, message))
        }
    }
}

fn of_docker(
    location: &RegistryReference,
    found: Result<DockerCredential, CredentialRetrievalError>,
) -> Result<Credentials, RegistryError> {
    let host = location.host();
    match found {
        Ok(DockerCredential::UsernamePassword(user, password)) => Ok(Credentials::basic(&user, &password)),
        Ok(DockerCredential::IdentityToken(_)) => {
            let [name, user, password] = VARIABLES;
            let message = format!(
                "docker keeps an identity token for {host}, which is not supported; set {name} to {host} and {user} and {password}"
            );
            Err(RegistryError::at(location, message))
        }
        // The file exists but is invalid; its content is not shown.
        Err(CredentialRetrievalError::CredentialDecodingError | CredentialRetrievalError::MalformedHelperResponse) => {
            let message = format!("what docker keeps for {host} cannot be read; run `docker login {host}` again");
            Err(RegistryError::at(location, message))
        }
        // No file, no entry, or a helper without credentials for the host, which exits with an error.
        Err(_) => Ok(Credentials::anonymous()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(config: &str) -> Result<Credentials, RegistryError> {
        let location = RegistryReference::parse("localhost:5000/a").unwrap();
        of_docker(&location, docker_credential::get_credential_from_reader(config.as_bytes(), location.host()))
    }

    #[test]
    fn what_docker_keeps_is_taken() {
        // "tester:geheim"
        let credentials = of(r#"{"auths":{"localhost:5000":{"auth":"dGVzdGVyOmdlaGVpbQ=="}}}"#).unwrap();
        assert_eq!(credentials, Credentials::basic("tester", "geheim"));
        assert!(!format!("{credentials:?}").contains("geheim"));
    }

    fn variables(values: [&str; 3]) -> Result<Option<Credentials>, RegistryError> {
        let location = RegistryReference::parse("registry.example.com:5000/a").unwrap();
        of_variables(&location, values.map(|value| (!value.is_empty()).then(|| value.to_owned())))
    }

    #[test]
    fn variables_are_sent_to_their_host_alone() {
        let ours = Some(Credentials::basic("tester", "geheim"));
        assert_eq!(variables(["registry.example.com:5000", "tester", "geheim"]).unwrap(), ours);
        assert_eq!(variables(["Registry.Example.com:5000", "tester", "geheim"]).unwrap(), ours);
        for other in ["registry.example.com", "registry.example.com:5001", "example.com", "localhost:5000"] {
            assert_eq!(variables([other, "tester", "geheim"]).unwrap(), None, "{other}");
        }
        assert_eq!(variables(["", "", ""]).unwrap(), None);
    }

    #[test]
    fn incomplete_variables_are_reported_without_showing_them() {
        for (values, missing) in [
            (["", "tester", "geheim"], "QUERL_REGISTRY_HOST"),
            (["registry.example.com:5000", "", "geheim"], "QUERL_REGISTRY_USER"),
            (["registry.example.com:5000", "tester", ""], "QUERL_REGISTRY_PASSWORD"),
        ] {
            let error = variables(values).unwrap_err().to_string();
            let expected = format!("registry.example.com:5000/a: {missing} is not set; set QUERL_");
            assert!(error.starts_with(&expected), "{error}");
            assert!(!error.contains("geheim"));
        }
    }

    #[test]
    fn no_credentials_are_used_where_docker_has_none() {
        assert_eq!(
            of(r#"{"auths":{"example.com":{"auth":"dGVzdGVyOmdlaGVpbQ=="}}}"#).unwrap(),
            Credentials::anonymous()
        );
        assert_eq!(of("{}").unwrap(), Credentials::anonymous());
    }

    #[test]
    fn unusable_credentials_are_reported_without_showing_them() {
        let error = of(r#"{"auths":{"localhost:5000":{"auth":"!geheim!"}}}"#).unwrap_err().to_string();
        let expected = "localhost:5000/a: what docker keeps for localhost:5000 cannot be read; run `docker login localhost:5000` again";
        assert_eq!(error, expected);
    }
}
