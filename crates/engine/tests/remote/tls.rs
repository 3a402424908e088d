//! Engines behind TLS.

use std::path::Path;

use super::*;

/// The server of [`serve`] behind TLS; also the file with its certificate.
async fn serve_tls(url: &str, dir: &Path) -> (String, std::path::PathBuf) {
    let signed = rcgen::generate_simple_self_signed(vec!["localhost".to_owned()]).unwrap();
    let file = dir.join("authority.pem");
    std::fs::write(&file, signed.cert.pem()).unwrap();
    let key = rustls::pki_types::PrivateKeyDer::try_from(signed.signing_key.serialize_der());
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let config = rustls::ServerConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .unwrap()
        .with_no_client_auth()
        .with_single_cert(vec![signed.cert.der().clone()], key.unwrap())
        .unwrap();
    let acceptor = tokio_rustls::TlsAcceptor::from(Arc::new(config));
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let port = listener.local_addr().unwrap().port();
    let inner = url.strip_prefix("http://").unwrap().to_owned();
    tokio::spawn(async move {
        while let Ok((stream, _)) = listener.accept().await {
            let (acceptor, inner) = (acceptor.clone(), inner.clone());
            tokio::spawn(async move {
                // A client that does not trust us hangs up here.
                let Ok(mut near) = acceptor.accept(stream).await else {
                    return;
                };
                let mut far = tokio::net::TcpStream::connect(inner).await.unwrap();
                let _ = tokio::io::copy_bidirectional(&mut near, &mut far).await;
            });
        }
    });
    (format!("https://localhost:{port}"), file)
}

#[tokio::test]
async fn https_with_an_authority_that_is_trusted_and_with_one_that_is_not() {
    let dir = tempfile::tempdir().unwrap();
    let (url, seen) = serve(vllm()).await;
    let (secure, file) = serve_tls(&url, dir.path()).await;
    let trusting = Endpoint {
        authorities: Some(file),
        api_key: Some("sk-of-the-engine".into()),
        ..Endpoint::new(&secure)
    };
    let engine = Vllm::connect(trusting.clone(), facts(), Api::default()).await;
    let generation = engine.unwrap().generate(request(&[10], 20)).await.unwrap();
    assert_eq!(generation.token_ids, [10, 11, 12, 13, 14, 2]);
    let asked = seen.lock().unwrap().len();
    let doubting = Endpoint::new(&secure);
    let error = Vllm::connect(doubting, facts(), Api::default())
        .await
        .unwrap_err();
    assert!(error.to_string().contains("certificate"), "{error}");
    assert_eq!(seen.lock().unwrap().len(), asked, "nothing was asked");
    let lost = Endpoint {
        authorities: Some(dir.path().join("none.pem")),
        ..trusting
    };
    let error = Vllm::connect(lost, facts(), Api::default())
        .await
        .unwrap_err();
    assert!(error.to_string().contains("none.pem"), "{error}");
}
