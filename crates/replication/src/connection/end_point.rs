//! Computes the hash of the server's certificate. Channel binding binds a login to this hash.
//!
//! Source: RFC 5929, "Channel Binding Type tls-server-end-point". The hash function is the one that
//! the certificate's signature uses, except that SHA-256 replaces SHA-1.

use rustls::pki_types::CertificateDer;
use sha2::{Digest, Sha256, Sha384, Sha512};
use x509_cert::Certificate;
use x509_cert::der::Decode;
use x509_cert::der::oid::ObjectIdentifier;
use x509_cert::der::oid::db::rfc5912::{
    ECDSA_WITH_SHA_256, ECDSA_WITH_SHA_384, SHA_1_WITH_RSA_ENCRYPTION, SHA_256_WITH_RSA_ENCRYPTION,
    SHA_384_WITH_RSA_ENCRYPTION, SHA_512_WITH_RSA_ENCRYPTION,
};

use super::tls::proves_its_key;

/// Computes the hash of `certificate`. Returns `None` in two cases:
///
/// - `hash` does not know the certificate's signature algorithm, for example Ed25519, which names no hash
///   function.
/// - The TLS handshake does not prove that the server owns the certificate's key. Anybody could have presented
///   such a certificate, so a login that is bound to it would not be protected.
pub(super) fn of(certificate: &CertificateDer<'_>) -> Option<Vec<u8>> {
    if !proves_its_key(certificate) {
        return None;
    }
    let parsed = Certificate::from_der(certificate).ok()?;
    hash(parsed.signature_algorithm.oid, certificate)
}

fn hash(signature: ObjectIdentifier, certificate: &[u8]) -> Option<Vec<u8>> {
    Some(match signature {
        SHA_1_WITH_RSA_ENCRYPTION | SHA_256_WITH_RSA_ENCRYPTION | ECDSA_WITH_SHA_256 => {
            Sha256::digest(certificate).to_vec()
        }
        SHA_384_WITH_RSA_ENCRYPTION | ECDSA_WITH_SHA_384 => Sha384::digest(certificate).to_vec(),
        SHA_512_WITH_RSA_ENCRYPTION => Sha512::digest(certificate).to_vec(),
        _ => return None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_signature_algorithm_determines_the_hash() {
        let bytes = |oid| hash(oid, b"a certificate").map(|hash| hash.len());
        assert_eq!(bytes(ECDSA_WITH_SHA_256), Some(32));
        assert_eq!(bytes(SHA_1_WITH_RSA_ENCRYPTION), Some(32));
        assert_eq!(bytes(SHA_384_WITH_RSA_ENCRYPTION), Some(48));
        assert_eq!(bytes(SHA_512_WITH_RSA_ENCRYPTION), Some(64));
        let ed25519 = ObjectIdentifier::new_unwrap("1.3.101.112");
        assert_eq!(bytes(ed25519), None);
    }
}
