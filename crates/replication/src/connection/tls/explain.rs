//! Explains a failed TLS handshake, with a hint for the operator.

use std::io;

use printable::shown_path;
use rustls::{
    AlertDescription, CertificateError, Error as TlsError, InvalidMessage, PeerIncompatible,
};

use super::failed;
use crate::connection::target::Target;
use crate::error::ReplicationError;

const SUPPORTED: &str = "docs/explanation/security.md lists the supported TLS versions, curves and \
    signature algorithms";
const VERSIONS: &str = "allow TLS 1.2 or 1.3 (ssl_min_protocol_version, ssl_max_protocol_version) in \
    the server and in DATABASE_URL";
const AUTHORITY: &str = "set sslrootcert to the PEM file of the authority that signed it, or of the \
    certificate itself if it is self-signed";
const NEW_CERTIFICATE: &str = "give the server a new certificate";

/// Returns the TLS error inside an IO error; `None` if the cause was the network, not TLS.
pub(in crate::connection) fn of_io(error: &io::Error) -> Option<TlsError> {
    error
        .get_ref()
        .and_then(|inner| inner.downcast_ref::<TlsError>())
        .cloned()
}

/// Converts a TLS error into an error with a hint for the operator.
pub(in crate::connection) fn explain(error: TlsError, target: &Target) -> ReplicationError {
    let (why, hint) = match &error {
        TlsError::InvalidCertificate(error) => of_certificate(error, target),
        TlsError::AlertReceived(alert) => of_alert(*alert),
        TlsError::PeerIncompatible(
            PeerIncompatible::ServerDoesNotSupportTls12Or13
            | PeerIncompatible::ServerTlsVersionIsDisabledByOurConfig
            | PeerIncompatible::SupportedVersionsExtensionRequired
            | PeerIncompatible::Tls12NotOffered
            | PeerIncompatible::Tls12NotOfferedOrEnabled,
        ) => (
            "the server offers no TLS version that is supported".into(),
            VERSIONS.into(),
        ),
        TlsError::PeerIncompatible(_) | TlsError::PeerMisbehaved(_) => (
            "the server's TLS is not compatible".into(),
            SUPPORTED.into(),
        ),
        TlsError::InvalidMessage(InvalidMessage::UnknownProtocolVersion) => (
            "the server offers no TLS version that is supported".into(),
            VERSIONS.into(),
        ),
        _ => return failed(target, "the handshake failed").caused_by(error),
    };
    failed(target, &why).caused_by(error).hint(hint)
}

fn of_certificate(error: &CertificateError, target: &Target) -> (String, String) {
    let authorities = match &target.ssl_root_cert {
        Some(path) => shown_path(path),
        None => "the system's list".to_owned(),
    };
    match error {
        CertificateError::Expired | CertificateError::ExpiredContext { .. } => (
            "the server's certificate, or one in its chain, has expired".into(),
            NEW_CERTIFICATE.into(),
        ),
        CertificateError::NotValidYet | CertificateError::NotValidYetContext { .. } => (
            "the server's certificate is not valid yet".into(),
            "compare the clocks of both machines".into(),
        ),
        CertificateError::UnknownIssuer => (
            format!("the server's certificate is signed by no authority in {authorities}"),
            AUTHORITY.into(),
        ),
        CertificateError::BadSignature => (
            format!(
                "the server's certificate is signed by no authority in {authorities}, although one has \
                 the name of its issuer; or the server does not own the certificate's key"
            ),
            AUTHORITY.into(),
        ),
        CertificateError::NotValidForNameContext { presented, .. } if presented.is_empty() => (
            "the server's certificate names no host in subjectAltName".into(),
            "create a certificate with a subjectAltName (its common name is ignored), or use \
             sslmode=verify-ca with sslrootcert"
                .into(),
        ),
        CertificateError::NotValidForName | CertificateError::NotValidForNameContext { .. } => (
            "the server's certificate is for another host".into(),
            "connect with a host name that is in the certificate, or use sslmode=verify-ca with \
             sslrootcert"
                .into(),
        ),
        CertificateError::UnsupportedSignatureAlgorithmContext { .. }
        | CertificateError::UnsupportedSignatureAlgorithmForPublicKeyContext { .. } => (
            "the server's certificate has a signature or key with an unsupported algorithm".into(),
            SUPPORTED.into(),
        ),
        CertificateError::InvalidPurpose | CertificateError::InvalidPurposeContext { .. } => (
            "the server's certificate is not meant for servers".into(),
            "create a certificate with the extended key usage serverAuth".into(),
        ),
        CertificateError::BadEncoding => (
            "the server's certificate cannot be read".into(),
            NEW_CERTIFICATE.into(),
        ),
        CertificateError::Other(other) => of_webpki(&other.to_string()),
        _ => (
            "the server's certificate is refused".into(),
            SUPPORTED.into(),
        ),
    }
}

/// Explains those errors of webpki for which rustls has no variant. We have only their names,
/// because webpki is not a direct dependency.
fn of_webpki(name: &str) -> (String, String) {
    let (why, hint) = match name {
        "UnsupportedCertVersion" => (
            "is of X.509 version 1, which cannot be verified",
            "create a certificate of version 3",
        ),
        "CaUsedAsEndEntity" => (
            "is the certificate of an authority",
            "set sslrootcert to the PEM file of this certificate, or create one without CA:TRUE",
        ),
        "EndEntityUsedAsCa" => (
            "is signed with a certificate that is not of an authority",
            "create the signing certificate with CA:TRUE, or set sslrootcert to the server's certificate",
        ),
        "UnsupportedCriticalExtension" => (
            "has a critical extension that is not supported",
            "create a certificate without this extension, or with the extension not critical",
        ),
        "NameConstraintViolation" | "PathLenConstraintViolated" => (
            "breaks a constraint of an authority in its chain",
            "create a certificate that the name constraints and the path length of the authority allow",
        ),
        _ => ("is refused", SUPPORTED),
    };
    (format!("the server's certificate {why}"), hint.into())
}

fn of_alert(alert: AlertDescription) -> (String, String) {
    match alert {
        AlertDescription::ProtocolVersion => (
            "the server offers no TLS version that is supported".into(),
            VERSIONS.into(),
        ),
        AlertDescription::HandshakeFailure | AlertDescription::InsufficientSecurity => (
            "client and server have no cipher, curve or signature algorithm in common".into(),
            format!("{SUPPORTED}; for example ssl_ecdh_curve=prime256v1 and an RSA or P-256 key"),
        ),
        AlertDescription::UnknownCA
        | AlertDescription::BadCertificate
        | AlertDescription::UnsupportedCertificate
        | AlertDescription::CertificateUnknown
        | AlertDescription::CertificateExpired
        | AlertDescription::CertificateRevoked
        | AlertDescription::CertificateRequired
        | AlertDescription::AccessDenied => (
            "the server refuses the client certificate, or requires one".into(),
            "set sslcert and sslkey to a certificate of an authority in the server's ssl_ca_file"
                .into(),
        ),
        _ => ("the server refuses the handshake".into(), SUPPORTED.into()),
    }
}
