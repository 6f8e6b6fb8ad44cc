//! Adds metrics of the build and of the process. The process metrics have the same names as in
//! Prometheus' own client libraries.
//!
//! The values of the process metrics come from `/proc`. A metric whose value cannot be read is left out, so
//! on systems other than Linux all of them are absent.

use std::fs;
use std::sync::OnceLock;
use std::sync::atomic::AtomicU64;

use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::registry::Registry;

use crate::build_info;

/// Number of clock ticks per second in `/proc`. It is 100 on all machines that we build for, because the kernel's
/// interface fixes it. Reading it from the C library (`sysconf`) would need `unsafe`.
const TICKS_PER_SECOND: f64 = 100.0;

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct BuildLabel {
    version: &'static str,
    commit: &'static str,
}

/// Registers the version and the commit, as labels of a gauge that is always 1.
pub(super) fn register_build(registry: &mut Registry) {
    let build = Family::<BuildLabel, Gauge>::default();
    let label = BuildLabel {
        version: build_info::VERSION,
        commit: build_info::commit().unwrap_or("unknown"),
    };
    build.get_or_create(&label).set(1);
    registry.register("build_info", "1, labelled with version and commit", build);
}

/// The resources that the process uses now.
#[derive(Debug, Default, PartialEq)]
struct ProcessUsage {
    cpu_seconds: Option<f64>,
    /// Seconds since 1970.
    started: Option<f64>,
    resident_bytes: Option<f64>,
    open_fds: Option<f64>,
    max_fds: Option<f64>,
}

pub(super) fn register_process(registry: &mut Registry) {
    static BOOT: OnceLock<Option<f64>> = OnceLock::new();
    let boot = *BOOT.get_or_init(|| boot_time(&fs::read_to_string("/proc/stat").ok()?));
    // The name of the program in these files might not be UTF-8, so replace bytes that are not.
    let file = |name: &str| {
        let bytes = fs::read(format!("/proc/self/{name}")).unwrap_or_default();
        String::from_utf8_lossy(&bytes).into_owned()
    };
    let mut usage = usage(boot, &file("stat"), &file("status"), &file("limits"));
    // Do not count the descriptor with which we read this folder.
    let fds = fs::read_dir("/proc/self/fd").map(|fds| fds.count().saturating_sub(1));
    usage.open_fds = fds.ok().map(|count| count as f64);

    if let Some(seconds) = usage.cpu_seconds {
        let counter = Counter::<f64, AtomicU64>::default();
        counter.inc_by(seconds);
        registry.register("cpu_seconds", "CPU time, user and system", counter);
    }
    let gauges = [
        (
            "resident_memory_bytes",
            "Resident memory",
            usage.resident_bytes,
        ),
        ("open_fds", "Open file descriptors", usage.open_fds),
        ("max_fds", "Limit of open file descriptors", usage.max_fds),
        (
            "start_time_seconds",
            "Start of the process, seconds since 1970",
            usage.started,
        ),
    ];
    for (name, help, value) in gauges {
        if let Some(value) = value {
            let gauge = Gauge::<f64, AtomicU64>::default();
            gauge.set(value);
            registry.register(name, help, gauge);
        }
    }
}

/// Returns when the machine started, from `/proc/stat`.
fn boot_time(stat: &str) -> Option<f64> {
    let line = stat.lines().find_map(|line| line.strip_prefix("btime "))?;
    line.trim().parse().ok()
}

/// Parses the files of `/proc/self`.
fn usage(boot: Option<f64>, stat: &str, status: &str, limits: &str) -> ProcessUsage {
    // The name of the program is in parentheses, and may itself contain spaces and parentheses.
    let fields = stat.rsplit_once(')').map_or("", |(_, fields)| fields);
    let ticks = |field: usize| -> Option<f64> {
        // proc(5) numbers the fields from 1. The first field after the name is number 3.
        fields.split_whitespace().nth(field - 3)?.parse().ok()
    };
    let cpu = ticks(14).zip(ticks(15));
    let started = boot.zip(ticks(22));
    let resident = status.lines().find_map(|line| {
        let kib = line.strip_prefix("VmRSS:")?.split_whitespace().next()?;
        kib.parse::<f64>().ok()
    });
    let max_fds = limits.lines().find_map(|line| {
        let soft = line
            .strip_prefix("Max open files")?
            .split_whitespace()
            .next()?;
        soft.parse().ok()
    });
    ProcessUsage {
        cpu_seconds: cpu.map(|(user, system)| (user + system) / TICKS_PER_SECOND),
        started: started.map(|(boot, after)| boot + after / TICKS_PER_SECOND),
        resident_bytes: resident.map(|kib| kib * 1024.0),
        open_fds: None,
        max_fds,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn process_usage_is_read_from_the_files_of_the_kernel() {
        let stat = "7 (a) b (c) S 1 7 7 0 -1 4194560 100 0 0 0 250 50 0 0 20 0 3 0 12345 1 2 3\n";
        let status = "Name:\ta\nVmPeak:\t  9 kB\nVmRSS:\t    2048 kB\n";
        let limits = "Limit                     Soft Limit           Hard Limit           Units\n\
                      Max open files            1024                 1048576              files\n";
        let boot = boot_time("cpu 1 2 3\nbtime 1700000000\nprocesses 5\n");
        let expected = ProcessUsage {
            cpu_seconds: Some(3.0),
            started: Some(1_700_000_123.45),
            resident_bytes: Some(2_097_152.0),
            open_fds: None,
            max_fds: Some(1024.0),
        };
        assert_eq!(usage(boot, stat, status, limits), expected);
        assert_eq!(usage(None, "", "", ""), ProcessUsage::default());
    }
}
