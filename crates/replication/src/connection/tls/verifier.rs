//! Verifies the server's certificate, as strictly as `sslmode` requires.

use std::sync::Arc;

use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::client::{WebPkiServerVerifier, verify_server_name};
use rustls::crypto::{CryptoProvider, WebPkiSupportedAlgorithms};
use rustls::pki_types::{CertificateDer, ServerName, UnixTime};
use rustls::server::ParsedCertificate;
use rustls::{CertificateError, DigitallySignedStruct, Error as TlsError, SignatureScheme};
use x509_cert::Certificate;
use x509_cert::der::Decode;

use super::public_key::PublicKey;
use super::{TrustedAuthorities, roots, tls_error};
use crate::connection::target::{SslMode, Target};
use crate::error::Result;

/// Signature schemes that some servers use but that ring cannot verify. We offer them only if `sslmode`
/// accepts any certificate.
const UNVERIFIABLE: [SignatureScheme; 5] = [
    SignatureScheme::ECDSA_NISTP521_SHA512,
    SignatureScheme::ED448,
    // For keys that allow only RSA-PSS (RFC 8446: rsa_pss_pss_sha256, 384 and 512).
    SignatureScheme::Unknown(0x0809),
    SignatureScheme::Unknown(0x080A),
    SignatureScheme::Unknown(0x080B),
];

/// Verifies the server's certificate according to `sslmode`.
#[derive(Debug)]
pub(super) enum Verifier {
    /// Accepts any certificate. But the server must still prove that it owns the certificate's key, because the
    /// login may be bound to the certificate. If ring does not support the key, the proof is not checked.
    Anything(WebPkiSupportedAlgorithms),
    /// Requires a certificate from a trusted authority.
    Trusted {
        chain: Arc<WebPkiServerVerifier>,
        /// Certificates that the server may also present as its own, without a chain to an
        /// authority.
        listed: Vec<CertificateDer<'static>>,
        /// Whether the certificate must name the host.
        names_host: bool,
    },
}

/// Whether ring can verify signatures made with this certificate's key. If it can, the TLS handshake succeeds
/// only if the server proves that it owns the key, even if `sslmode` accepts any certificate.
pub(in crate::connection) fn proves_its_key(certificate: &CertificateDer<'_>) -> bool {
    let algorithms = rustls::crypto::ring::default_provider().signature_verification_algorithms;
    PublicKey::of_certificate(certificate).is_some_and(|key| key.is_supported(&algorithms))
}

impl Verifier {
    pub(super) fn new(target: &Target, provider: Arc<CryptoProvider>) -> Result<Self> {
        let root_file = target.ssl_root_cert.as_deref();
        let names_host = match (target.ssl_mode, root_file) {
            (SslMode::VerifyFull, _) => true,
            (SslMode::VerifyCa, _) | (SslMode::Require, Some(_)) => false,
            (SslMode::Require, None) | (SslMode::Prefer | SslMode::Disable, _) => {
                return Ok(Self::Anything(provider.signature_verification_algorithms));
            }
        };
        let TrustedAuthorities { store, listed } = roots(root_file)?;
        let chain = WebPkiServerVerifier::builder_with_provider(Arc::new(store), provider)
            .build()
            .map_err(|e| tls_error("TLS cannot be set up").caused_by(e))?;
        Ok(Self::Trusted {
            chain,
            listed,
            names_host,
        })
    }

    /// Verifies the signature with which the server proves that it owns the key, in TLS 1.2 and
    /// 1.3. Accepts any signature if ring does not support the key.
    fn verify_signature(
        algorithms: &WebPkiSupportedAlgorithms,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signed: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, TlsError> {
        let key = PublicKey::of_certificate(certificate)
            .ok_or(TlsError::InvalidCertificate(CertificateError::BadEncoding))?;
        let is_valid = !key.is_supported(algorithms)
            || key.verify(algorithms, signed.scheme, message, signed.signature());
        if is_valid {
            Ok(HandshakeSignatureValid::assertion())
        } else {
            Err(TlsError::InvalidCertificate(CertificateError::BadSignature))
        }
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
        let Self::Trusted {
            chain,
            listed,
            names_host,
        } = self
        else {
            return Ok(ServerCertVerified::assertion());
        };
        if listed.contains(end_entity) {
            // sslrootcert contains the server's own certificate. If that certificate is an
            // authority, webpki would refuse it as a server certificate, so do not ask webpki.
            is_in_its_time(end_entity, now)?;
            if *names_host {
                verify_server_name(&ParsedCertificate::try_from(end_entity)?, server_name)?;
            }
            return Ok(ServerCertVerified::assertion());
        }
        match chain.verify_server_cert(end_entity, intermediates, server_name, ocsp_response, now) {
            // webpki checks the name last. So an error about the name means that the chain is valid, which
            // is enough if the certificate need not name the host.
            Err(TlsError::InvalidCertificate(
                CertificateError::NotValidForName | CertificateError::NotValidForNameContext { .. },
            )) if !names_host => Ok(ServerCertVerified::assertion()),
            other => other,
        }
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        cert: &CertificateDer<'_>,
        dss: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, TlsError> {
        match self {
            Self::Anything(algorithms) => Self::verify_signature(algorithms, message, cert, dss),
            Self::Trusted { chain, .. } => chain.verify_tls12_signature(message, cert, dss),
        }
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        cert: &CertificateDer<'_>,
        dss: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, TlsError> {
        match self {
            Self::Anything(algorithms) => Self::verify_signature(algorithms, message, cert, dss),
            Self::Trusted { chain, .. } => chain.verify_tls13_signature(message, cert, dss),
        }
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        match self {
            Self::Anything(algorithms) => {
                let mut schemes = algorithms.supported_schemes();
                schemes.extend(UNVERIFIABLE);
                schemes
            }
            Self::Trusted { chain, .. } => chain.supported_verify_schemes(),
        }
    }
}

fn is_in_its_time(certificate: &CertificateDer<'_>, now: UnixTime) -> Result<(), TlsError> {
    let invalid = |error| Err(TlsError::InvalidCertificate(error));
    let Ok(parsed) = Certificate::from_der(certificate) else {
        return invalid(CertificateError::BadEncoding);
    };
    let validity = parsed.tbs_certificate.validity;
    let now = now.as_secs();
    if now < validity.not_before.to_unix_duration().as_secs() {
        return invalid(CertificateError::NotValidYet);
    }
    if now > validity.not_after.to_unix_duration().as_secs() {
        return invalid(CertificateError::Expired);
    }
    Ok(())
}
