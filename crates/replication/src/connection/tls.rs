//! TLS for replication and SQL sessions. `sslmode` means the same as in libpq.
//!
//! All TLS uses the same rustls provider (ring). All decisions about verification are in
//! `tls/verifier.rs`. `tls/explain.rs` explains failed handshakes. `tls/public_key.rs` reads the
//! key of a certificate that webpki refuses.

mod explain;
mod public_key;
mod verifier;

use std::net::{IpAddr, Ipv4Addr};
use std::path::Path;
use std::sync::Arc;

use printable::shown_path;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName};
use rustls::{ClientConfig, RootCertStore, SupportedProtocolVersion};

use super::target::{SslMode, Target};
use crate::error::{ErrorKind, ReplicationError, Result};

pub(super) use explain::{explain, of_io};
use verifier::Verifier;
pub(super) use verifier::proves_its_key;

/// Builds the TLS configuration for the target's `sslmode`, authorities and client certificate.
///
/// # Errors
/// `Tls` if a file cannot be read or contains no certificate.
pub(crate) fn client_config(target: &Target) -> Result<ClientConfig> {
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let wanted = target.tls_versions;
    let versions: Vec<&SupportedProtocolVersion> = [
        (wanted.tls13, &rustls::version::TLS13),
        (wanted.tls12, &rustls::version::TLS12),
    ]
    .into_iter()
    .filter_map(|(is_wanted, version)| is_wanted.then_some(version))
    .collect();
    let builder = ClientConfig::builder_with_provider(provider.clone())
        .with_protocol_versions(&versions)
        .map_err(|e| tls_error("TLS cannot be set up").caused_by(e))?
        .dangerous()
        .with_custom_certificate_verifier(Arc::new(Verifier::new(target, provider)?));
    let mut config = match &target.ssl_client {
        None => builder.with_no_client_auth(),
        Some((cert, key)) => builder
            .with_client_auth_cert(certificates(cert)?, private_key(key)?)
            .map_err(|e| tls_error("the client certificate cannot be used").caused_by(e))?,
    };
    config.enable_sni = target.ssl_sni;
    Ok(config)
}

/// Converts the host to a TLS server name. A name that no certificate can contain is an error only if
/// `sslmode` verifies the name.
///
/// # Errors
/// `Tls`.
pub(super) fn server_name(host: &str, target: &Target) -> Result<ServerName<'static>> {
    match ServerName::try_from(host.to_owned()) {
        Ok(name) => Ok(name),
        Err(_) if target.ssl_mode != SslMode::VerifyFull => {
            // The placeholder has no effect: rustls never sends an IP address to the server, and this
            // `sslmode` does not compare the name with the certificate.
            Ok(ServerName::from(IpAddr::from(Ipv4Addr::UNSPECIFIED)))
        }
        Err(e) => Err(failed(target, "no certificate can name this host").caused_by(e)),
    }
}

/// Builds the error for a TLS session that could not be opened.
pub(super) fn failed(target: &Target, why: &str) -> ReplicationError {
    tls_error(format!("no TLS session with PostgreSQL as {target}: {why}"))
}

fn tls_error(what: impl Into<String>) -> ReplicationError {
    ReplicationError::new(ErrorKind::Tls, what)
}

fn certificates(path: &Path) -> Result<Vec<CertificateDer<'static>>> {
    let unreadable = |e| tls_error(format!("cannot read {}", shown_path(path))).caused_by(e);
    let list = CertificateDer::pem_file_iter(path)
        .map_err(|e| unreadable(e.to_string()))?
        .collect::<Result<Vec<_>, _>>()
        .map_err(|e| unreadable(e.to_string()))?;
    if list.is_empty() {
        return Err(tls_error(format!(
            "{} contains no certificate",
            shown_path(path)
        )));
    }
    Ok(list)
}

fn private_key(path: &Path) -> Result<PrivateKeyDer<'static>> {
    PrivateKeyDer::from_pem_file(path).map_err(|e| {
        tls_error(format!("cannot read {}", shown_path(path))).caused_by(e.to_string())
    })
}

/// The trusted authorities: from the file that `sslrootcert` names, or else from the operating system.
struct TrustedAuthorities {
    store: RootCertStore,
    /// The certificates in the file. The server is also trusted if its own certificate is one of
    /// them.
    listed: Vec<CertificateDer<'static>>,
}

fn roots(file: Option<&Path>) -> Result<TrustedAuthorities> {
    let mut store = RootCertStore::empty();
    let listed = match file {
        Some(path) => {
            let listed = certificates(path)?;
            // Skip a certificate that cannot be an authority. It may be the server's own certificate,
            // which is trusted because `listed` contains it.
            store.add_parsable_certificates(listed.iter().cloned());
            listed
        }
        None => {
            store.add_parsable_certificates(rustls_native_certs::load_native_certs().certs);
            Vec::new()
        }
    };
    if store.is_empty() {
        return Err(match file {
            Some(path) => tls_error(format!(
                "{} contains no usable certificate",
                shown_path(path)
            )),
            None => tls_error("no trusted authority is known").hint(
                "set sslrootcert to the PEM file of the server's authority, \
                 or install the package ca-certificates",
            ),
        });
    }
    Ok(TrustedAuthorities { store, listed })
}
