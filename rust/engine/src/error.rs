//! Errors of the engine.

use crate::limits::Shortage;
use crate::spec::SpecError;

/// An error of the engine. A worker that fails to start is reported as an event, not as an error.
#[derive(Debug, thiserror::Error)]
#[expect(missing_docs, reason = "each message says what it is about")]
pub enum Error {
    #[error(transparent)]
    Spec(#[from] SpecError),
    #[error(transparent)]
    Limit(#[from] Shortage),
    #[error("{0}")]
    Binding(String),
    #[error("this supervisor is running a group: wait for its end, or use a second supervisor")]
    Busy,
    #[error(
        "SIGCHLD is ignored in this process, so exit statuses would be lost: give it its default action first"
    )]
    ChildSignalIgnored,
    #[error("no worker can be added: this supervisor runs no group, or the group is ending")]
    Ending,
    #[error("this supervisor runs no group: call start first, or wait for a limited time")]
    Idle,
    #[error(
        "this supervisor belongs to the process that made it, and is of no use in a forked child: make another"
    )]
    Forked,
    #[error("this supervisor is closed")]
    Closed,
    #[error(
        "{0}: the limit of processes and threads is reached, raise it (ulimit -u, pids.max of the control group)"
    )]
    NoThread(&'static str),
    #[error("{what}: {source}")]
    Os {
        what: &'static str,
        source: std::io::Error,
    },
}

impl Error {
    /// For `map_err` when a thread could not be started.
    pub(crate) fn thread(what: &'static str) -> impl FnOnce(std::io::Error) -> Self {
        move |source| {
            if source.kind() == std::io::ErrorKind::WouldBlock {
                Self::NoThread(what)
            } else {
                Self::Os { what, source }
            }
        }
    }

    /// For `map_err` on results of the standard library and rustix.
    pub(crate) fn os<E: Into<std::io::Error>>(what: &'static str) -> impl FnOnce(E) -> Self {
        move |error| Self::Os {
            what,
            source: error.into(),
        }
    }
}
