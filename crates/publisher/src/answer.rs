//! Reads the answer to a request: one gRPC message, or a status that says why there is no message.
//!
//! Sources: gRPC over HTTP/2, "Responses". For answers without a gRPC status: gRPC's table of HTTP
//! codes (`doc/http-grpc-status-mapping.md`).

use bytes::{Buf, Bytes, BytesMut};
use tonic::codegen::http::{HeaderMap, StatusCode};
use tonic::{Code, Status};

use super::body::GRPC_HEADER;
use super::details;

/// Maximum length in bytes of an answer. No answer needs as much. For example, a thousand message ids take 24
/// KiB.
const MOST_BYTES: usize = 4 << 20;

/// Returns the status in an answer's headers or trailers, if there is one.
pub(super) fn status(mut headers: HeaderMap) -> Option<Result<(), Status>> {
    if headers.get(Status::GRPC_STATUS)? == "0" {
        return Some(Ok(()));
    }
    details::remove_unreadable(&mut headers);
    let status = Status::from_header_map(&headers)?;
    Some(match status.code() {
        Code::Ok => Ok(()),
        _ => Err(status),
    })
}

/// Returns the status for an answer that has no gRPC status. Such an answer comes from a proxy
/// between us and Pub/Sub.
pub(super) fn without_status(http: StatusCode) -> Status {
    let code = match http {
        StatusCode::BAD_REQUEST => Code::Internal,
        StatusCode::UNAUTHORIZED => Code::Unauthenticated,
        StatusCode::FORBIDDEN => Code::PermissionDenied,
        StatusCode::NOT_FOUND => Code::Unimplemented,
        StatusCode::TOO_MANY_REQUESTS
        | StatusCode::BAD_GATEWAY
        | StatusCode::SERVICE_UNAVAILABLE
        | StatusCode::GATEWAY_TIMEOUT => Code::Unavailable,
        _ => Code::Unknown,
    };
    Status::new(
        code,
        format!("the answer has no gRPC status, only HTTP {http}"),
    )
}

/// The data of an answer, collected while it arrives.
#[derive(Debug, Default)]
pub(super) struct Data {
    /// The first part, which nearly always contains all of the data.
    first: Bytes,
    more: BytesMut,
}

impl Data {
    pub(super) fn push(&mut self, data: Bytes) -> Result<(), Status> {
        if self.first.is_empty() {
            self.first = data;
            return Ok(());
        }
        if self.more.is_empty() {
            self.more.extend_from_slice(&self.first);
        }
        self.more.extend_from_slice(&data);
        if self.more.len() <= MOST_BYTES {
            Ok(())
        } else {
            Err(Status::internal("the answer is too long"))
        }
    }

    /// Returns the only message of the answer.
    pub(super) fn into_message(self) -> Result<Bytes, Status> {
        let mut data = if self.more.is_empty() {
            self.first
        } else {
            self.more.freeze()
        };
        if data.len() < GRPC_HEADER {
            return Err(Status::internal("the answer has no message"));
        }
        let compressed = data.get_u8();
        let bytes = data.get_u32() as usize;
        if compressed != 0 || bytes != data.len() {
            let what = "the answer is compressed, or is not exactly one message";
            return Err(Status::internal(what));
        }
        Ok(data)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ANSWER: &[u8] = b"\0\0\0\0\x03abc";

    fn message(parts: &[&'static [u8]]) -> Result<Bytes, Code> {
        let mut data = Data::default();
        for part in parts {
            data.push(Bytes::from_static(part)).unwrap();
        }
        data.into_message().map_err(|status| status.code())
    }

    #[test]
    fn a_message_is_read_however_many_parts_it_arrives_in() {
        assert_eq!(message(&[ANSWER]).unwrap(), "abc");
        assert_eq!(
            message(&[&ANSWER[..2], &ANSWER[2..7], &ANSWER[7..]]).unwrap(),
            "abc"
        );
    }

    #[test]
    fn an_answer_that_is_not_exactly_one_message_has_an_unknown_outcome() {
        let truncated = &ANSWER[..7];
        let compressed: &[u8] = b"\x01\0\0\0\x03abc";
        for parts in [&[][..], &[truncated], &[compressed], &[ANSWER, ANSWER]] {
            assert_eq!(message(parts), Err(Code::Internal), "{parts:?}");
        }
    }

    #[test]
    fn an_endless_answer_is_cut_off() {
        let mut data = Data::default();
        let part = Bytes::from_static(&[0; 1 << 20]);
        let taken = (0..100).take_while(|_| data.push(part.clone()).is_ok());
        assert!(taken.count() <= 5);
    }

    #[test]
    fn an_answer_of_a_proxy_is_retried_unless_permission_is_missing() {
        use super::super::failure::{Class, Failure};
        let class = |http: u16| {
            let status = without_status(StatusCode::from_u16(http).unwrap());
            Failure::from_status(&status).class
        };
        for http in [200, 204, 302, 400, 408, 429, 500, 502, 503, 504] {
            assert_eq!(class(http), Class::UnknownOutcome, "{http}");
        }
        for http in [401, 403, 404] {
            assert_eq!(class(http), Class::Environment, "{http}");
        }
    }
}
