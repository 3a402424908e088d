//! Images that the engine does not have: pulled from a small registry of this test's own, refused
//! with a reason, or not pulled at all. And an engine behind TLS.

use std::{
    collections::BTreeMap,
    io::{BufRead, BufReader, Write},
    net::{TcpListener, TcpStream},
    path::Path,
    sync::Arc,
};

use sandbox::{
    DockerConfig, DockerProvider, Exit, Provider, RefusalCause, SandboxError, Spec, docker_doctor,
};
use sha2::{Digest, Sha256};

use crate::{
    engines::{Engine, Kind},
    suite,
};

const NAME: &str = "espalier-pulled";

fn digest(bytes: &[u8]) -> String {
    format!("sha256:{}", hex::encode(Sha256::digest(bytes)))
}

/// Serves one image of one layer, over the protocol of registries; gives its port.
fn registry(rootfs: Vec<u8>) -> u16 {
    let layer = digest(&rootfs);
    let config = serde_json::json!({
        "architecture": if cfg!(target_arch = "aarch64") { "arm64" } else { "amd64" },
        "os": "linux",
        "config": {},
        "rootfs": {"type": "layers", "diff_ids": [layer]},
    })
    .to_string()
    .into_bytes();
    const KIND: &str = "application/vnd.docker.distribution.manifest.v2+json";
    let manifest = serde_json::json!({
        "schemaVersion": 2,
        "mediaType": KIND,
        "config": {
            "mediaType": "application/vnd.docker.container.image.v1+json",
            "size": config.len(),
            "digest": digest(&config),
        },
        "layers": [{
            "mediaType": "application/vnd.docker.image.rootfs.diff.tar.gzip",
            "size": rootfs.len(),
            "digest": layer,
        }],
    })
    .to_string()
    .into_bytes();
    let blob = "application/octet-stream";
    let at = |kind: &str, name: &str| format!("/v2/{NAME}/{kind}/{name}");
    let files: BTreeMap<String, (&str, Vec<u8>)> = [
        ("/v2/".to_owned(), ("application/json", b"{}".to_vec())),
        (at("manifests", "1"), (KIND, manifest.clone())),
        (at("manifests", &digest(&manifest)), (KIND, manifest)),
        (at("blobs", &digest(&config)), (blob, config)),
        (at("blobs", &layer), (blob, rootfs)),
    ]
    .into();
    let files = Arc::new(files);
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    std::thread::spawn(move || {
        for stream in listener.incoming().flatten() {
            let files = Arc::clone(&files);
            std::thread::spawn(move || answer(stream, &files));
        }
    });
    port
}

fn answer(stream: TcpStream, files: &BTreeMap<String, (&str, Vec<u8>)>) {
    let mut writer = stream.try_clone().unwrap();
    let mut lines = BufReader::new(stream).lines();
    while let Some(Ok(request)) = lines.next() {
        while lines
            .next()
            .is_some_and(|line| line.is_ok_and(|line| !line.is_empty()))
        {}
        let mut parts = request.split(' ');
        let (method, path) = (parts.next().unwrap_or(""), parts.next().unwrap_or(""));
        let unknown = br#"{"errors":[{"code":"MANIFEST_UNKNOWN","message":"manifest unknown"}]}"#;
        let (status, (kind, body)) = match files.get(path) {
            Some((kind, body)) => ("200 OK", (*kind, body.as_slice())),
            None => ("404 Not Found", ("application/json", unknown.as_slice())),
        };
        let digest = digest(body);
        let head = format!(
            "HTTP/1.1 {status}\r\nContent-Type: {kind}\r\nContent-Length: {}\r\nDocker-Content-Digest: {digest}\r\n\
             Docker-Distribution-Api-Version: registry/2.0\r\n\r\n",
            body.len()
        );
        let body = if method == "HEAD" { &[] } else { body };
        if writer.write_all(head.as_bytes()).is_err() || writer.write_all(body).is_err() {
            return;
        }
    }
}

fn config(host: &str, image: Option<String>) -> DockerConfig {
    DockerConfig {
        host: Some(host.to_owned()),
        image,
        ..DockerConfig::default()
    }
}

async fn says_hello(provider: &DockerProvider) {
    let sandbox = provider
        .create(Spec {
            name: "pulled".into(),
            ..Spec::default()
        })
        .await
        .unwrap();
    assert_eq!(suite::say(&*sandbox, "echo hello").await, "hello");
    assert_eq!(suite::run(&*sandbox, "true").await.exit, Exit::Code(0));
    sandbox.destroy().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_the_engine_lacks_is_pulled_or_refused_with_the_reason() {
    let Some(engine) = Engine::start(Kind::Docker) else {
        return;
    };
    // Engines speak plain HTTP with registries of this machine.
    let image = |tag: &str, port: u16| format!("127.0.0.1:{port}/{NAME}:{tag}");
    let port = registry(suite::rootfs::rootfs());

    let never = DockerConfig {
        pull: false,
        ..config(&engine.host, Some(image("1", port)))
    };
    let checks = docker_doctor(&never).await;
    assert!(checks[0].ok && !checks[1].ok, "{checks:?}");
    match DockerProvider::start(never).await {
        Err(SandboxError::Refused { cause, hint, .. }) => {
            assert_eq!(cause, RefusalCause::Image);
            assert!(hint.contains("sandbox.pull"), "{hint}");
        }
        other => panic!("{other:?}"),
    }

    let missing = DockerProvider::start(config(&engine.host, Some(image("2", port)))).await;
    match missing {
        Err(SandboxError::Refused { cause, reason, .. }) => {
            assert_eq!(cause, RefusalCause::Image, "{reason}");
        }
        other => panic!("{other:?}"),
    }
    let closed = TcpListener::bind("127.0.0.1:0").unwrap();
    let nobody = closed.local_addr().unwrap().port();
    drop(closed);
    let nowhere = DockerProvider::start(config(&engine.host, Some(image("1", nobody)))).await;
    assert!(
        matches!(nowhere, Err(SandboxError::Create { .. })),
        "{nowhere:?}"
    );

    let provider = DockerProvider::start(config(&engine.host, Some(image("1", port))))
        .await
        .unwrap();
    let checks = docker_doctor(&config(&engine.host, Some(image("1", port)))).await;
    assert!(checks.iter().all(|check| check.ok), "{checks:?}");
    says_hello(&provider).await;
    provider.close().await;

    // Named by a sandbox and not by the settings: pulled when it is made.
    let provider = DockerProvider::start(config(&engine.host, None))
        .await
        .unwrap();
    let spec = Spec {
        image: Some(image("3", port)),
        ..Spec::default()
    };
    let refused = provider.create(spec).await.map(drop);
    assert!(
        matches!(
            refused,
            Err(SandboxError::Refused {
                cause: RefusalCause::Image,
                ..
            })
        ),
        "{refused:?}"
    );
    provider.close().await;
    engine.assert_empty();
}

/// Certificates as the field keeps them: `ca.pem`, `cert.pem`, `key.pem`; and what a server needs.
fn certificates(folder: &Path) -> rustls::ServerConfig {
    use rcgen::{BasicConstraints, CertificateParams, CertifiedIssuer, IsCa, KeyPair};
    let mut params = CertificateParams::new(Vec::new()).unwrap();
    params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    let authority = CertifiedIssuer::self_signed(params, KeyPair::generate().unwrap()).unwrap();
    let signed = |name: &str| {
        let key = KeyPair::generate().unwrap();
        let params = CertificateParams::new(vec![name.to_owned()]).unwrap();
        (params.signed_by(&key, &authority).unwrap(), key)
    };
    let (client, client_key) = signed("client");
    std::fs::write(folder.join("ca.pem"), authority.pem()).unwrap();
    std::fs::write(folder.join("cert.pem"), client.pem()).unwrap();
    std::fs::write(folder.join("key.pem"), client_key.serialize_pem()).unwrap();
    let (server, server_key) = signed("localhost");
    let mut roots = rustls::RootCertStore::empty();
    roots.add(authority.der().clone()).unwrap();
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let verifier = rustls::server::WebPkiClientVerifier::builder_with_provider(
        Arc::new(roots),
        Arc::clone(&provider),
    );
    let key = rustls::pki_types::PrivateKeyDer::try_from(server_key.serialize_der());
    rustls::ServerConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .unwrap()
        .with_client_cert_verifier(verifier.build().unwrap())
        .with_single_cert(vec![server.der().clone()], key.unwrap())
        .unwrap()
}

#[expect(
    clippy::disallowed_methods,
    reason = "a relay that lives as long as its test"
)]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_engine_behind_tls_wants_our_certificate_and_gets_it() {
    let Some(engine) = Engine::start(Kind::Docker) else {
        return;
    };
    let folder = tempfile::tempdir().unwrap();
    let acceptor = tokio_rustls::TlsAcceptor::from(Arc::new(certificates(folder.path())));
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let host = format!("tcp://localhost:{}", listener.local_addr().unwrap().port());
    let socket = engine.host.strip_prefix("unix://").unwrap().to_owned();
    let relay = tokio::spawn(async move {
        while let Ok((stream, _)) = listener.accept().await {
            let (acceptor, socket) = (acceptor.clone(), socket.clone());
            tokio::spawn(async move {
                let Ok(mut near) = acceptor.accept(stream).await else {
                    return;
                };
                let mut far = tokio::net::UnixStream::connect(socket).await.unwrap();
                let _ = tokio::io::copy_bidirectional(&mut near, &mut far).await;
            });
        }
    });
    // Without a certificate nobody answers.
    let plain = DockerProvider::start(config(&host, None)).await;
    assert!(
        matches!(plain, Err(SandboxError::Unsupported { .. })),
        "{plain:?}"
    );
    let with = |cert_path: &Path| DockerConfig {
        cert_path: Some(cert_path.to_owned()),
        ..config(&host, None)
    };
    let empty = tempfile::tempdir().unwrap();
    let lost = DockerProvider::start(with(empty.path())).await.unwrap_err();
    assert!(lost.to_string().contains("ca.pem"), "{lost}");
    // One whose server we do not trust.
    let other = tempfile::tempdir().unwrap();
    let _ = certificates(other.path());
    let doubt = DockerProvider::start(with(other.path())).await.unwrap_err();
    assert!(doubt.to_string().contains("TLS"), "{doubt}");

    let provider = DockerProvider::start(with(folder.path())).await.unwrap();
    let image = provider
        .import(suite::rootfs::rootfs(), "espalier-test:1")
        .await
        .unwrap();
    provider.close().await;
    let image = Some(image);
    let provider = DockerProvider::start(DockerConfig {
        image,
        ..with(folder.path())
    });
    let provider = provider.await.unwrap();
    says_hello(&provider).await;
    provider.close().await;
    relay.abort();
    engine.assert_empty();
}
