//! Tests of targets as users write them: URLs and environment variables, correct ones and wrong
//! ones.

use super::*;
use crate::error::ErrorKind;

fn target(url: &str, env: &[(&str, &str)]) -> Result<Option<Target>> {
    let env = env
        .iter()
        .map(|(k, v)| ((*k).into(), (*v).into()))
        .collect();
    Target::from_settings(url, &env)
}

#[test]
fn a_url_with_tls_parameters_is_parsed() {
    let url = "postgres://relay:s%40cret@db.example:6543/shop\
               ?sslmode=verify-full&sslrootcert=%2Fetc%2Fca.pem&connect_timeout=3";
    let target = target(url, &[]).unwrap().unwrap();
    assert_eq!(target.to_string(), "relay@db.example:6543/shop");
    assert_eq!(target.password.as_deref(), Some("s@cret"));
    assert_eq!(target.ssl_mode, SslMode::VerifyFull);
    assert_eq!(target.ssl_root_cert, Some("/etc/ca.pem".into()));
}

#[test]
fn the_environment_supplies_parameters_that_the_url_omits() {
    let env = [
        ("PGUSER", "relay"),
        ("PGPASSWORD", "p"),
        ("PGSSLMODE", "require"),
    ];
    let target = target("postgres://db/shop", &env).unwrap().unwrap();
    assert_eq!((target.user.as_str(), target.port), ("relay", 5432));
    assert_eq!(target.ssl_mode, SslMode::Require);
}

#[test]
fn channel_binding_defaults_to_prefer_and_the_url_wins_over_the_environment() {
    let binding = |url, env| target(url, env).map(|found| found.unwrap().channel_binding);
    let asked = "postgres://u@h/d?channel_binding=require&sslmode=require";
    assert_eq!(binding(asked, &[]).unwrap(), ChannelBinding::Require);
    let env = [("PGCHANNELBINDING", "disable")];
    assert_eq!(binding(asked, &env).unwrap(), ChannelBinding::Require);
    let plain = "postgres://u@h/d";
    assert_eq!(binding(plain, &env).unwrap(), ChannelBinding::Disable);
    assert_eq!(binding(plain, &[]).unwrap(), ChannelBinding::Prefer);
    assert!(binding("postgres://u@h/d?channel_binding=on", &[]).is_err());
}

#[test]
fn libpq_variables_alone_are_enough_and_a_folder_means_a_unix_socket() {
    let env = [
        ("PGHOST", "/run/postgresql"),
        ("PGPORT", "5433"),
        ("PGUSER", "relay"),
    ];
    let target = target("", &env).unwrap().unwrap();
    assert_eq!(
        target.socket_path(),
        Some("/run/postgresql/.s.PGSQL.5433".into())
    );
    assert_eq!(target.database, "relay");
    assert!(!target.may_use_tls());
}

#[test]
fn sslrootcert_system_requires_verify_full() {
    let found = target("postgres://u@h/d?sslrootcert=system", &[])
        .unwrap()
        .unwrap();
    assert_eq!(found.ssl_mode, SslMode::VerifyFull);
    assert!(target("postgres://u@h/d?sslrootcert=system&sslmode=require", &[]).is_err());
}

#[test]
fn verify_ca_needs_the_file_of_an_authority() {
    let mode =
        |url: &str, env: &[(&str, &str)]| target(url, env).map(|found| found.unwrap().ssl_mode);
    for (url, env) in [
        ("postgres://u@h/d?sslmode=verify-ca", ("PGSSLROOTCERT", "")),
        ("postgres://u@h/d", ("PGSSLMODE", "verify-ca")),
    ] {
        let env = [env];
        let error = mode(url, &env).unwrap_err();
        assert_eq!(error.kind(), &ErrorKind::InvalidTarget);
        assert!(error.hint_text().contains("sslrootcert"), "{error}");
    }
    let file = [("PGSSLROOTCERT", "/etc/ca.pem")];
    let url = "postgres://u@h/d?sslmode=verify-ca";
    assert_eq!(mode(url, &file).unwrap(), SslMode::VerifyCa);
    // As in libpq, a connection over a Unix socket uses no TLS, so no file is needed.
    let socket = "postgres://u@%2Frun/d?sslmode=verify-ca";
    assert_eq!(mode(socket, &[]).unwrap(), SslMode::VerifyCa);
}

#[test]
fn an_address_next_to_a_unix_socket_is_refused() {
    let address = [("PGHOSTADDR", "10.0.0.7")];
    let socket = [("PGHOST", "/run/postgresql")];
    for (url, env) in [
        ("postgres://u@%2Frun/d?hostaddr=10.0.0.7", &[][..]),
        ("postgres://u@%2Frun/d", &address),
        ("postgres://u@/d?hostaddr=10.0.0.7", &socket),
    ] {
        let error = target(url, env).unwrap_err();
        assert!(error.to_string().contains("hostaddr"), "{error}");
        assert!(!error.to_string().contains("10.0.0.7"), "{error}");
    }
}

#[test]
fn without_any_setting_there_is_no_target() {
    assert!(target("", &[]).unwrap().is_none());
}

#[test]
fn a_password_is_in_no_debug_output_and_in_no_error() {
    let good = target("postgres://u:hunter2@h/d", &[]).unwrap().unwrap();
    assert!(!format!("{good:?} {good}").contains("hunter2"));
    for bad in [
        "postgres://u:hunter2@h:port/d",
        "http://u:hunter2@h/d",
        "postgres://u:hunter2@h/d?sslmode=x",
    ] {
        let error = target(bad, &[]).unwrap_err();
        assert_eq!(error.kind(), &ErrorKind::InvalidTarget);
        assert!(
            !format!("{error} {error:?}").contains("hunter2"),
            "{error:?}"
        );
    }
}

#[test]
fn libpq_values_are_parsed_and_errors_do_not_show_them() {
    let url = "postgres://u@h/d?hostaddr=10.0.0.7&connect_timeout=1&keepalives=0\
               &keepalives_count=3&tcp_user_timeout=1500&options=endpoint%3Dep-1\
               &target_session_attrs=primary&ssl_max_protocol_version=TLSv1.2&sslsni=0";
    let found = target(url, &[]).unwrap().unwrap();
    assert_eq!(found.host_addr, Some([10, 0, 0, 7].into()));
    assert_eq!(found.connect_timeout, Duration::from_secs(2));
    assert!(!found.keepalives.enabled && found.primary_only && !found.ssl_sni);
    assert_eq!(found.keepalives.count, Some(3));
    assert_eq!(
        found.keepalives.user_timeout,
        Some(Duration::from_millis(1500))
    );
    assert_eq!(found.options.as_deref(), Some("endpoint=ep-1"));
    assert!(found.tls_versions.tls12 && !found.tls_versions.tls13);
    for wrong in [
        "port=ter2",
        "port=0",
        "hostaddr=ter2",
        "connect_timeout=ter2",
        "keepalives_idle=ter2",
        "target_session_attrs=standby",
        "target_session_attrs=ter2",
        "options=-c%20search_path%3Dter2",
        "sslsni=ter2",
        "ssl_min_protocol_version=ter2",
        "ssl_max_protocol_version=TLSv1.1",
        "host=ter2%20ter2",
        "port=1,2",
    ] {
        let error = target(&format!("postgres://u@/d?{wrong}"), &[]).unwrap_err();
        assert_eq!(error.kind(), &ErrorKind::InvalidTarget, "{wrong}");
        let shown = format!("{error} {error:?} {}", error.hint_text());
        assert!(!shown.contains("ter2"), "{wrong}: {shown}");
    }
}
