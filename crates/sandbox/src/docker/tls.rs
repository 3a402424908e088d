//! Engines behind TLS: the files that the field keeps in `DOCKER_CERT_PATH`.

use std::{
    fmt,
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};

use rustls::{
    ClientConfig, RootCertStore,
    pki_types::{CertificateDer, PrivateKeyDer, ServerName, pem::PemObject},
};
use tokio::{net::TcpStream, time::timeout};
use tokio_rustls::{TlsConnector, client::TlsStream};

use super::DockerConfig;

/// For agreeing on keys.
const HANDSHAKE_TIMEOUT: Duration = Duration::from_secs(10);

/// How to speak with one engine.
#[derive(Clone)]
pub(super) struct Tls {
    name: ServerName<'static>,
    connector: TlsConnector,
}

impl fmt::Debug for Tls {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Tls")
            .field("name", &self.name)
            .finish_non_exhaustive()
    }
}

/// Where the files are; `None` without TLS.
fn folder(config: &DockerConfig) -> Option<PathBuf> {
    let variable = |name| std::env::var_os(name).filter(|value| !value.is_empty());
    let default = || {
        variable("DOCKER_TLS_VERIFY")?;
        let home = || Some(PathBuf::from(variable("HOME")?).join(".docker"));
        variable("DOCKER_CERT_PATH")
            .map(PathBuf::from)
            .or_else(home)
    };
    config.cert_path.clone().or_else(default)
}

impl Tls {
    /// For the engine at `HOST:PORT`.
    pub(super) fn of(config: &DockerConfig, host: &str) -> Result<Option<Self>, String> {
        match folder(config) {
            None => Ok(None),
            Some(folder) => Self::read(&folder, host).map(Some),
        }
    }

    fn read(folder: &Path, host: &str) -> Result<Self, String> {
        let at = |name: &str| folder.join(name);
        let wrong = |name: &str, what: String| {
            format!(
                "{}: {what}; expected a PEM file, beside ca.pem, cert.pem and key.pem",
                at(name).display()
            )
        };
        let certificates = |name: &str| {
            let all: Result<Vec<CertificateDer<'static>>, _> =
                CertificateDer::pem_file_iter(at(name)).and_then(Iterator::collect);
            match all {
                Ok(all) if all.is_empty() => Err(wrong(name, "there is none".to_owned())),
                Ok(all) => Ok(all),
                Err(error) => Err(wrong(name, error.to_string())),
            }
        };
        let mut roots = RootCertStore::empty();
        for certificate in certificates("ca.pem")? {
            roots
                .add(certificate)
                .map_err(|error| wrong("ca.pem", error.to_string()))?;
        }
        let key = PrivateKeyDer::from_pem_file(at("key.pem"))
            .map_err(|error| wrong("key.pem", error.to_string()))?;
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let config = ClientConfig::builder_with_provider(provider)
            .with_safe_default_protocol_versions()
            .map_err(|error| format!("TLS: {error}"))?
            .with_root_certificates(roots)
            .with_client_auth_cert(certificates("cert.pem")?, key)
            .map_err(|error| wrong("cert.pem", error.to_string()))?;
        let (name, _) = host.rsplit_once(':').unwrap_or((host, ""));
        let name = name.trim_start_matches('[').trim_end_matches(']');
        let name = ServerName::try_from(name.to_owned())
            .map_err(|error| format!("engine address {host:?}: {error}"))?;
        Ok(Self {
            name,
            connector: TlsConnector::from(Arc::new(config)),
        })
    }

    /// Speaks TLS over a connection.
    pub(super) async fn connect(&self, stream: TcpStream) -> Result<TlsStream<TcpStream>, String> {
        let connecting = self.connector.connect(self.name.clone(), stream);
        match timeout(HANDSHAKE_TIMEOUT, connecting).await {
            Ok(Ok(stream)) => Ok(stream),
            Ok(Err(error)) => Err(format!("TLS with {:?}: {error}", self.name)),
            Err(_) => Err(format!(
                "no TLS with {:?} within {HANDSHAKE_TIMEOUT:?}",
                self.name
            )),
        }
    }
}
