//! Reads the public key of a certificate and ignores the rest of the certificate.
//!
//! `sslmode=prefer` and `require` accept any certificate, but the server must still prove that it
//! owns the certificate's key. webpki returns no key for some certificates, for example with a
//! version before 3 or with an unknown critical extension. So we read the key ourselves.

use rustls::SignatureScheme;
use rustls::crypto::WebPkiSupportedAlgorithms;

// The tags of the DER values that we read:
const INTEGER: u8 = 0x02;
const BIT_STRING: u8 = 0x03;
const SEQUENCE: u8 = 0x30;
/// The tag `[0]`, which marks the version of a certificate. A certificate of version 1 does not contain it.
const VERSION: u8 = 0xA0;

/// Minimum length in bytes of an RSA key that ring accepts.
const RSA_MIN: usize = 2048 / 8;

/// A public key and its algorithm.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct PublicKey<'a> {
    /// The AlgorithmIdentifier, without its DER tag and length.
    algorithm: &'a [u8],
    key: &'a [u8],
}

impl<'a> PublicKey<'a> {
    /// Reads the key from a certificate. `None` if the bytes are not a certificate.
    ///
    /// Source: RFC 5280, 4.1. The key is in SubjectPublicKeyInfo, which follows version, serial
    /// number, signature, issuer, validity and subject.
    pub(super) fn of_certificate(der: &'a [u8]) -> Option<Self> {
        let mut certificate = content(&mut { der }, SEQUENCE)?;
        let mut fields = content(&mut certificate, SEQUENCE)?;
        if fields.first() == Some(&VERSION) {
            content(&mut fields, VERSION)?;
        }
        content(&mut fields, INTEGER)?;
        for _ in ["signature", "issuer", "validity", "subject"] {
            content(&mut fields, SEQUENCE)?;
        }
        let mut info = content(&mut fields, SEQUENCE)?;
        let algorithm = content(&mut info, SEQUENCE)?;
        let key = content(&mut info, BIT_STRING)?;
        let (unused_bits, key) = key.split_first()?;
        (*unused_bits == 0).then_some(Self { algorithm, key })
    }

    /// Whether ring can verify signatures made with this key.
    pub(super) fn is_supported(&self, algorithms: &WebPkiSupportedAlgorithms) -> bool {
        let all = algorithms.all.iter();
        let is_known = all
            .map(|algorithm| algorithm.public_key_alg_id())
            .any(|id| id.as_ref() == self.algorithm);
        is_known && self.rsa_modulus().is_none_or(|modulus| modulus >= RSA_MIN)
    }

    /// Verifies a signature in the TLS handshake.
    pub(super) fn verify(
        &self,
        algorithms: &WebPkiSupportedAlgorithms,
        scheme: SignatureScheme,
        message: &[u8],
        signature: &[u8],
    ) -> bool {
        let of_scheme = algorithms
            .mapping
            .iter()
            .find(|(known, _)| *known == scheme);
        let candidates = of_scheme.map_or(&[][..], |(_, candidates)| *candidates);
        candidates
            .iter()
            .filter(|candidate| candidate.public_key_alg_id().as_ref() == self.algorithm)
            .any(|candidate| {
                candidate
                    .verify_signature(self.key, message, signature)
                    .is_ok()
            })
    }

    /// Length of an RSA key's modulus in bytes; `None` for keys of other kinds.
    fn rsa_modulus(&self) -> Option<usize> {
        let mut fields = content(&mut { self.key }, SEQUENCE)?;
        let modulus = content(&mut fields, INTEGER)?;
        Some(modulus.iter().skip_while(|byte| **byte == 0).count())
    }
}

/// Takes one value with this tag off the front of `input`, and returns the value's content.
fn content<'a>(input: &mut &'a [u8], tag: u8) -> Option<&'a [u8]> {
    let (found, rest) = input.split_first()?;
    let (first, mut rest) = rest.split_first()?;
    let length = match usize::from(*first) {
        short @ ..0x80 => short,
        long => {
            let (bytes, behind) = rest.split_at_checked(long - 0x80)?;
            rest = behind;
            let digits = bytes.iter().skip_while(|byte| **byte == 0);
            match digits.clone().count() {
                1..=4 => digits.fold(0, |length, byte| (length << 8) | usize::from(*byte)),
                _ => return None,
            }
        }
    };
    let (content, behind) = rest.split_at_checked(length)?;
    *input = behind;
    (*found == tag).then_some(content)
}
