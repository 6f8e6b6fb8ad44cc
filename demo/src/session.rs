//! A session with the demonstration's own PostgreSQL, which needs neither TLS nor a password.

use std::ops::{Deref, DerefMut};

use tokio::task::JoinHandle;
use tokio_postgres::{Client, Config, NoTls};

use crate::error::{Result, failed};

/// Statement timeout, long enough for a machine under load.
const LIMITS: &str = "-c statement_timeout=30s";

/// A session, which ends when this value is dropped.
#[derive(Debug)]
pub(crate) struct Session {
    client: Client,
    driver: JoinHandle<()>,
}

impl Session {
    /// Connects to the database that the URL names.
    pub(crate) async fn connect(url: &str, application_name: &str) -> Result<Self> {
        let mut config: Config = url.parse()?;
        config.application_name(application_name).options(LIMITS);
        let (client, connection) = config
            .connect(NoTls)
            .await
            .map_err(|e| failed("cannot connect to PostgreSQL").caused_by(e))?;
        let driver = tokio::spawn(async move {
            // Ignore an error here, because the statement that the error interrupts reports it too.
            let _ = connection.await;
        });
        Ok(Self { client, driver })
    }
}

impl Deref for Session {
    type Target = Client;

    fn deref(&self) -> &Client {
        &self.client
    }
}

impl DerefMut for Session {
    fn deref_mut(&mut self) -> &mut Client {
        &mut self.client
    }
}

impl Drop for Session {
    fn drop(&mut self) {
        self.driver.abort();
    }
}
