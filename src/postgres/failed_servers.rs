//! Collects the configured servers that a session could not use, and decides whether the session tries the next
//! server.

use crate::error::{Code, Error, Result};

/// The servers that could not be used so far.
#[derive(Debug, Default)]
pub(super) struct FailedServers(Vec<Error>);

impl FailedServers {
    /// Adds the error of a server that cannot be used.
    ///
    /// # Errors
    /// The same error, if the remaining servers must not be tried.
    pub(super) fn add(&mut self, error: Error) -> Result<()> {
        match error.code() {
            Code::PostgresUnreachable | Code::PostgresStopping | Code::PostgresStandby => {
                tracing::debug!(code = %error.code(), "{error}");
                self.0.push(error);
                Ok(())
            }
            _ => Err(error),
        }
    }

    /// Returns one error for all servers that failed, with the reason for each. The error has the code of the
    /// last server that answered, or `postgres-unreachable` if no server answered.
    pub(super) fn into_error(mut self) -> Error {
        if self.0.len() == 1 {
            return self.0.remove(0);
        }
        let mut codes = self.0.iter().map(Error::code);
        let code = codes.rfind(|code| *code != Code::PostgresUnreachable);
        let reasons: Vec<String> = self.0.iter().map(ToString::to_string).collect();
        let what = format!(
            "none of {} servers can be used: {}",
            reasons.len(),
            reasons.join("; ")
        );
        Error::new(code.unwrap_or(Code::PostgresUnreachable), what)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_error_has_the_reason_of_each_server_and_the_code_of_one_that_answered() {
        let mut failed = FailedServers::default();
        for (code, what) in [
            (Code::PostgresStandby, "a is a standby"),
            (Code::PostgresUnreachable, "b does not answer"),
        ] {
            failed.add(Error::new(code, what)).unwrap();
        }
        let error = failed.into_error();
        assert_eq!(error.code(), Code::PostgresStandby);
        assert_eq!(
            error.what(),
            "none of 2 servers can be used: a is a standby; b does not answer"
        );
        for code in [
            Code::PostgresAuthentication,
            Code::PostgresTls,
            Code::PasswordCommand,
        ] {
            let ended = FailedServers::default().add(Error::new(code, "refused"));
            assert_eq!(ended.unwrap_err().code(), code);
        }
    }
}
