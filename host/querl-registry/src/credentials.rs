//! Who we are to a registry.

use crate::error::RegistryError;
use crate::location::Location;
use docker_credential::{CredentialRetrievalError, DockerCredential};
use oci_client::secrets::RegistryAuth;

const USER: &str = "QUERL_REGISTRY_USER";
const PASSWORD: &str = "QUERL_REGISTRY_PASSWORD";

/// Who we are to a registry. No message and no `Debug` output shows the password.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Credentials(RegistryAuth);

impl Credentials {
    /// Nobody: what public repositories want.
    pub fn anonymous() -> Self {
        Self(RegistryAuth::Anonymous)
    }

    /// A user with a password or an access token.
    pub fn basic(user: &str, password: &str) -> Self {
        Self(RegistryAuth::Basic(user.to_owned(), password.to_owned()))
    }

    /// The environment variables `QUERL_REGISTRY_USER` and `QUERL_REGISTRY_PASSWORD`; else what `docker login` keeps for the
    /// registry in `~/.docker/config.json` (or the folder in `DOCKER_CONFIG`) or its credential helper; else nobody.
    ///
    /// # Errors
    /// One variable is set without the other, or docker keeps something that is no user with a password.
    pub fn find(location: &Location) -> Result<Self, RegistryError> {
        let variable = |name: &str| std::env::var(name).ok().filter(|value| !value.is_empty());
        match (variable(USER), variable(PASSWORD)) {
            (Some(user), Some(password)) => Ok(Self::basic(&user, &password)),
            (None, None) => Self::of_docker(location),
            (set, _) => {
                let (set, missing) = if set.is_some() { (USER, PASSWORD) } else { (PASSWORD, USER) };
                Err(RegistryError::at(location, format!("{set} is set and {missing} is not; set both or none")))
            }
        }
    }

    fn of_docker(location: &Location) -> Result<Self, RegistryError> {
        let key = match location.host() {
            "docker.io" => "https://index.docker.io/v1/",
            host => host,
        };
        found(location, docker_credential::get_credential(key))
    }

    pub(crate) fn auth(&self) -> &RegistryAuth {
        &self.0
    }
}

fn found(
    location: &Location,
    found: Result<DockerCredential, CredentialRetrievalError>,
) -> Result<Credentials, RegistryError> {
    let host = location.host();
    match found {
        Ok(DockerCredential::UsernamePassword(user, password)) => Ok(Credentials::basic(&user, &password)),
        Ok(DockerCredential::IdentityToken(_)) => {
            let message =
                format!("docker keeps an identity token for {host}, which is not supported; set {USER} and {PASSWORD}");
            Err(RegistryError::at(location, message))
        }
        // A file that is there and cannot be understood; what it holds is not shown.
        Err(CredentialRetrievalError::CredentialDecodingError | CredentialRetrievalError::MalformedHelperResponse) => {
            let message = format!("what docker keeps for {host} cannot be read; run `docker login {host}` again");
            Err(RegistryError::at(location, message))
        }
        // No file, no entry, or a helper that knows none, which it tells by failing.
        Err(_) => Ok(Credentials::anonymous()),
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    fn of(config: &str) -> Result<Credentials, RegistryError> {
        let location = Location::parse("localhost:5000/a").unwrap();
        found(&location, docker_credential::get_credential_from_reader(config.as_bytes(), location.host()))
    }

    #[test]
    fn what_docker_keeps_is_taken() {
        // "tester:geheim"
        let credentials = of(r#"{"auths":{"localhost:5000":{"auth":"dGVzdGVyOmdlaGVpbQ=="}}}"#).unwrap();
        assert_eq!(credentials, Credentials::basic("tester", "geheim"));
        assert!(!format!("{credentials:?}").contains("geheim"));
    }

    #[test]
    fn nobody_is_taken_where_docker_keeps_nothing() {
        assert_eq!(
            of(r#"{"auths":{"example.com":{"auth":"dGVzdGVyOmdlaGVpbQ=="}}}"#).unwrap(),
            Credentials::anonymous()
        );
        assert_eq!(of("{}").unwrap(), Credentials::anonymous());
    }

    #[test]
    fn what_cannot_be_used_is_told_without_showing_it() {
        let error = of(r#"{"auths":{"localhost:5000":{"auth":"!geheim!"}}}"#).unwrap_err().to_string();
        assert_eq!(
            error,
            "localhost:5000/a: what docker keeps for localhost:5000 cannot be read; run `docker login localhost:5000` again"
        );
    }
}
