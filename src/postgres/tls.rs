//! TLS for both kinds of session, with libpq's meaning of `sslmode`.
//!
//! One rustls provider (ring). What is verified is decided here and nowhere else.

use std::path::Path;
use std::sync::Arc;

use rustls::client::WebPkiServerVerifier;
use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::crypto::{CryptoProvider, verify_tls12_signature, verify_tls13_signature};
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName, UnixTime};
use rustls::{
    CertificateError, ClientConfig, DigitallySignedStruct, Error as TlsError, RootCertStore,
    SignatureScheme,
};

use super::target::{SslMode, Target};
use crate::error::{Code, Error, Result};

/// What TLS takes for this target's `sslmode`, roots and client certificate.
///
/// # Errors
/// `postgres-tls` when a file cannot be read or holds no certificate.
pub(crate) fn client_config(target: &Target) -> Result<ClientConfig> {
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let builder = ClientConfig::builder_with_provider(provider.clone())
        .with_safe_default_protocol_versions()
        .map_err(|e| tls_error("TLS cannot be set up").caused_by(e))?
        .dangerous()
        .with_custom_certificate_verifier(Arc::new(Verifier::new(target, provider)?));
    match &target.ssl_client {
        None => Ok(builder.with_no_client_auth()),
        Some((cert, key)) => builder
            .with_client_auth_cert(certificates(cert)?, private_key(key)?)
            .map_err(|e| tls_error("the client certificate cannot be used").caused_by(e)),
    }
}

fn tls_error(what: impl Into<String>) -> Error {
    Error::new(Code::PostgresTls, what)
}

fn certificates(path: &Path) -> Result<Vec<CertificateDer<'static>>> {
    let unreadable = |e| tls_error(format!("cannot read {}", path.display())).caused_by(e);
    let list = CertificateDer::pem_file_iter(path)
        .map_err(|e| unreadable(e.to_string()))?
        .collect::<Result<Vec<_>, _>>()
        .map_err(|e| unreadable(e.to_string()))?;
    if list.is_empty() {
        return Err(tls_error(format!(
            "{} holds no certificate",
            path.display()
        )));
    }
    Ok(list)
}

fn private_key(path: &Path) -> Result<PrivateKeyDer<'static>> {
    PrivateKeyDer::from_pem_file(path)
        .map_err(|e| tls_error(format!("cannot read {}", path.display())).caused_by(e.to_string()))
}

fn roots(file: Option<&Path>) -> Result<RootCertStore> {
    let mut store = RootCertStore::empty();
    match file {
        Some(path) => {
            for certificate in certificates(path)? {
                store.add(certificate).map_err(|e| {
                    tls_error(format!("{} cannot be used", path.display())).caused_by(e)
                })?;
            }
        }
        None => {
            store.add_parsable_certificates(rustls_native_certs::load_native_certs().certs);
        }
    }
    if store.is_empty() {
        return Err(tls_error("no trusted authority is known").hint(
            "set sslrootcert to the PEM file of the server's authority, \
             or install the package ca-certificates",
        ));
    }
    Ok(store)
}

/// How much of the server's certificate is verified.
#[derive(Debug)]
enum Verifier {
    /// Nothing but the proof that the server owns its key.
    Anything(Arc<CryptoProvider>),
    /// The chain to a trusted authority, whatever the name.
    Authority(Arc<WebPkiServerVerifier>),
    /// Chain and name.
    Full(Arc<WebPkiServerVerifier>),
}

impl Verifier {
    fn new(target: &Target, provider: Arc<CryptoProvider>) -> Result<Self> {
        let root_file = target.ssl_root_cert.as_deref();
        let chain = |provider| {
            WebPkiServerVerifier::builder_with_provider(Arc::new(roots(root_file)?), provider)
                .build()
                .map_err(|e| tls_error("TLS cannot be set up").caused_by(e))
        };
        Ok(match (target.ssl_mode, root_file) {
            (SslMode::VerifyFull, _) => Verifier::Full(chain(provider)?),
            (SslMode::VerifyCa, _) | (SslMode::Require, Some(_)) => {
                Verifier::Authority(chain(provider)?)
            }
            (SslMode::Require, None) | (SslMode::Prefer | SslMode::Disable, _) => {
                Verifier::Anything(provider)
            }
        })
    }
}

impl ServerCertVerifier for Verifier {
    fn verify_server_cert(
        &self,
        end_entity: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        server_name: &ServerName<'_>,
        ocsp_response: &[u8],
        now: UnixTime,
    ) -> Result<ServerCertVerified, TlsError> {
        match self {
            Verifier::Anything(_) => Ok(ServerCertVerified::assertion()),
            Verifier::Full(chain) => {
                chain.verify_server_cert(end_entity, intermediates, server_name, ocsp_response, now)
            }
            // webpki looks at the name last: an error about it says that the chain is good.
            Verifier::Authority(chain) => match chain.verify_server_cert(
                end_entity,
                intermediates,
                server_name,
                ocsp_response,
                now,
            ) {
                Err(TlsError::InvalidCertificate(
                    CertificateError::NotValidForName
                    | CertificateError::NotValidForNameContext { .. },
                )) => Ok(ServerCertVerified::assertion()),
                other => other,
            },
        }
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        cert: &CertificateDer<'_>,
        dss: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, TlsError> {
        match self {
            Verifier::Anything(provider) => verify_tls12_signature(
                message,
                cert,
                dss,
                &provider.signature_verification_algorithms,
            ),
            Verifier::Authority(chain) | Verifier::Full(chain) => {
                chain.verify_tls12_signature(message, cert, dss)
            }
        }
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        cert: &CertificateDer<'_>,
        dss: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, TlsError> {
        match self {
            Verifier::Anything(provider) => verify_tls13_signature(
                message,
                cert,
                dss,
                &provider.signature_verification_algorithms,
            ),
            Verifier::Authority(chain) | Verifier::Full(chain) => {
                chain.verify_tls13_signature(message, cert, dss)
            }
        }
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        match self {
            Verifier::Anything(provider) => provider
                .signature_verification_algorithms
                .supported_schemes(),
            Verifier::Authority(chain) | Verifier::Full(chain) => chain.supported_verify_schemes(),
        }
    }
}
