//! Makes the name of this process, by which PostgreSQL and other relays know it.

use std::hash::{BuildHasher, RandomState};
use std::time::Instant;

/// Maximum length of the host name in the instance name, in bytes. PostgreSQL truncates names to 63 bytes,
/// and the other parts of the name take up to 30.
const MAX_HOST_NAME: usize = 33;

/// Returns a name that no other process has.
pub(super) fn new_name() -> String {
    // Two containers may have the same host name and the same pid, so add a random number.
    let random = RandomState::new().hash_one(Instant::now()) as u32;
    instance_name(&host_name(), random, std::process::id())
}

/// Returns the instance name. Shortens the host name. Otherwise PostgreSQL could cut off the random number
/// and the pid, which distinguish two relays.
fn instance_name(host: &str, random: u32, pid: u32) -> String {
    let end = (0..=MAX_HOST_NAME)
        .rev()
        .find(|end| host.is_char_boundary(*end));
    let host = &host[..end.unwrap_or(0).min(host.len())];
    format!("postrider {host}/{random:08x}:{pid}")
}

fn host_name() -> String {
    std::fs::read_to_string("/proc/sys/kernel/hostname")
        .map(|name| name.trim().to_owned())
        .ok()
        .or_else(|| std::env::var("HOSTNAME").ok())
        .unwrap_or_else(|| "localhost".into())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn instance_names_differ_within_63_bytes_even_for_the_same_host_and_pid() {
        let name = instance_name("shop", 0x1a2b, 1);
        assert_eq!(name, "postrider shop/00001a2b:1");
        for host in ["x".repeat(64), "\u{e9}".repeat(32)] {
            let name = |random| instance_name(&host, random, u32::MAX);
            assert!(name(0).len() <= 63 && name(0).starts_with("postrider "));
            assert_ne!(name(0), name(1));
        }
    }
}
