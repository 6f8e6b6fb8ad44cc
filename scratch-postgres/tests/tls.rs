//! Tests of scratch servers with TLS. Each test starts a real server.

use std::io::{Read, Write};
use std::net::TcpStream;

use scratch_postgres::{Builder, ScratchPostgres, Tls};

fn with_certificate(client_ca: bool) -> Builder {
    let made = rcgen::generate_simple_self_signed(vec!["localhost".to_owned()]).expect("made");
    ScratchPostgres::builder().tls(Tls {
        cert_pem: made.cert.pem(),
        key_pem: made.signing_key.serialize_pem(),
        client_ca_pem: client_ca.then(|| made.cert.pem()),
    })
}

/// Sends a connection's first message and returns the first byte of the answer.
fn first_answer(server: &ScratchPostgres, code: [u8; 4], body: &[u8]) -> u8 {
    let mut stream = TcpStream::connect((server.host(), server.port())).expect("connect");
    let length = u32::try_from(body.len() + 8).expect("short").to_be_bytes();
    stream
        .write_all(&[&length[..], &code[..], body].concat())
        .expect("write");
    let mut answer = [0];
    stream.read_exact(&mut answer).expect("read");
    answer[0]
}

const SSL_REQUEST: [u8; 4] = [4, 210, 22, 47];
const PROTOCOL_3: [u8; 4] = [0, 3, 0, 0];
const AS_POSTGRES: &[u8] = b"user\0postgres\0database\0postgres\0\0";

#[test]
fn a_server_with_a_certificate_offers_tls_and_refuses_tcp_without_it() {
    let server = with_certificate(false).start().expect("start");
    assert_eq!(first_answer(&server, SSL_REQUEST, b""), b'S');
    assert_eq!(first_answer(&server, PROTOCOL_3, AS_POSTGRES), b'E');
}

#[test]
fn a_custom_rule_can_allow_tcp_without_tls() {
    let server = with_certificate(true)
        .hba_line("hostnossl all all 127.0.0.1/32 trust")
        .start()
        .expect("start");
    assert_eq!(first_answer(&server, SSL_REQUEST, b""), b'S');
    assert_eq!(first_answer(&server, PROTOCOL_3, AS_POSTGRES), b'R');
}
