//! Creates certificates of servers and of authorities, also unusual ones.

use std::process::Command;

use rcgen::{
    BasicConstraints, CertificateParams, CustomExtension, DistinguishedName, DnType, IsCa, Issuer,
    KeyPair, date_time_ymd,
};
use tempfile::TempDir;

/// A certificate and its key.
#[derive(Clone)]
pub(super) struct Certificate {
    pub(super) cert_pem: String,
    pub(super) key_pem: String,
}

fn params(names: &[&str], change: impl FnOnce(&mut CertificateParams)) -> CertificateParams {
    let names: Vec<String> = names.iter().map(|name| (*name).into()).collect();
    let mut params = CertificateParams::new(names).unwrap();
    let mut name = DistinguishedName::new();
    name.push(DnType::CommonName, "localhost");
    params.distinguished_name = name;
    change(&mut params);
    params
}

/// Creates a self-signed certificate.
pub(super) fn made(names: &[&str], change: impl FnOnce(&mut CertificateParams)) -> Certificate {
    let key = KeyPair::generate().unwrap();
    Certificate {
        cert_pem: params(names, change).self_signed(&key).unwrap().pem(),
        key_pem: key.serialize_pem(),
    }
}

/// An authority that signs certificates of servers.
pub(super) struct Authority {
    pub(super) cert_pem: String,
    issuer: Issuer<'static, KeyPair>,
}

impl Authority {
    pub(super) fn new(change: impl FnOnce(&mut CertificateParams)) -> Self {
        let key = KeyPair::generate().unwrap();
        let mut params = params(&[], is_authority);
        let mut name = DistinguishedName::new();
        name.push(DnType::CommonName, "authority");
        params.distinguished_name = name;
        change(&mut params);
        Self {
            cert_pem: params.self_signed(&key).unwrap().pem(),
            issuer: Issuer::new(params, key),
        }
    }

    /// Creates a certificate for `localhost`.
    pub(super) fn sign(&self, change: impl FnOnce(&mut CertificateParams)) -> Certificate {
        let key = KeyPair::generate().unwrap();
        let params = params(&["localhost"], change);
        Certificate {
            cert_pem: params.signed_by(&key, &self.issuer).unwrap().pem(),
            key_pem: key.serialize_pem(),
        }
    }
}

pub(super) fn is_authority(params: &mut CertificateParams) {
    params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
}

pub(super) fn has_expired(params: &mut CertificateParams) {
    params.not_before = date_time_ymd(2001, 1, 1);
    params.not_after = date_time_ymd(2002, 1, 1);
}

pub(super) fn is_not_valid_yet(params: &mut CertificateParams) {
    params.not_before = date_time_ymd(2200, 1, 1);
    params.not_after = date_time_ymd(2201, 1, 1);
}

pub(super) fn has_an_unknown_critical_extension(params: &mut CertificateParams) {
    let mut odd = CustomExtension::from_oid_content(&[1, 2, 3, 4], vec![5, 0]);
    odd.set_criticality(true);
    params.custom_extensions.push(odd);
}

pub(super) const RSA: [&str; 4] = ["-algorithm", "RSA", "-pkeyopt", "rsa_keygen_bits:2048"];
const P256: [&str; 4] = ["-algorithm", "EC", "-pkeyopt", "ec_paramgen_curve:P-256"];
pub(super) const P521: [&str; 4] = ["-algorithm", "EC", "-pkeyopt", "ec_paramgen_curve:P-521"];

/// Runs openssl in the folder. Returns `None` if it is not installed.
fn openssl(folder: &TempDir, arguments: &[&str]) -> Option<()> {
    let mut command = Command::new("openssl");
    let Ok(ran) = command.args(arguments).current_dir(folder.path()).output() else {
        eprintln!("SKIPPED: openssl is not installed");
        return None;
    };
    let said = String::from_utf8_lossy(&ran.stderr);
    assert!(ran.status.success(), "{arguments:?}: {said}");
    Some(())
}

fn read(folder: &TempDir, name: &str) -> String {
    std::fs::read_to_string(folder.path().join(name)).unwrap()
}

/// Creates the key `key.pem`, and a request for a certificate in `request.pem`.
fn request(folder: &TempDir, key: &[&str]) -> Option<()> {
    let genpkey = [&["genpkey", "-out", "key.pem"], key].concat();
    openssl(folder, &genpkey)?;
    let request = "req -new -key key.pem -subj /CN=localhost -out request.pem";
    openssl(folder, &request.split(' ').collect::<Vec<_>>())
}

/// Creates a self-signed certificate with a key or version that rcgen does not support. Returns `None`
/// if openssl is not installed.
pub(super) fn by_openssl(key: &[&str], make: &[&str]) -> Option<Certificate> {
    let folder = TempDir::new().unwrap();
    request(&folder, key)?;
    let sign = "x509 -req -in request.pem -signkey key.pem -days 30 -out cert.pem";
    let sign: Vec<&str> = sign.split(' ').collect();
    openssl(&folder, &[&sign, make].concat())?;
    Some(Certificate {
        cert_pem: read(&folder, "cert.pem"),
        key_pem: read(&folder, "key.pem"),
    })
}

/// Creates a certificate with a P-256 key that an authority with a P-521 key has signed. Returns the certificate,
/// and the PEM of the authority.
pub(super) fn signed_with_p521() -> Option<(Certificate, String)> {
    let folder = TempDir::new().unwrap();
    let genpkey = [&["genpkey", "-out", "ca-key.pem"], &P521[..]].concat();
    openssl(&folder, &genpkey)?;
    let authority = "req -x509 -key ca-key.pem -sha512 -subj /CN=authority -days 30 -out ca.pem";
    openssl(&folder, &authority.split(' ').collect::<Vec<_>>())?;
    request(&folder, &P256)?;
    std::fs::write(folder.path().join("names"), "subjectAltName=DNS:localhost").unwrap();
    let sign = "x509 -req -in request.pem -CA ca.pem -CAkey ca-key.pem -CAcreateserial -sha512 -days 30 \
                -extfile names -out cert.pem";
    openssl(&folder, &sign.split(' ').collect::<Vec<_>>())?;
    let certificate = Certificate {
        cert_pem: read(&folder, "cert.pem"),
        key_pem: read(&folder, "key.pem"),
    };
    Some((certificate, read(&folder, "ca.pem")))
}
