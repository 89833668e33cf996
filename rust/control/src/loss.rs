//! Why a connection has ended.

use rustix::io::Errno;

use crate::frame::Damaged;

/// Why a link is lost: a kind for programs, and words that follow the name of the other side.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Loss {
    /// `closed`, `unreachable`, `silent`, `stuck` or `damaged`.
    pub kind: &'static str,
    /// For the user.
    pub reason: String,
}

impl Loss {
    /// The other side has closed the connection.
    pub fn closed() -> Self {
        Self::new("closed", "has closed the connection")
    }

    pub(crate) fn new(kind: &'static str, reason: impl Into<String>) -> Self {
        Self {
            kind,
            reason: reason.into(),
        }
    }
}

/// Why nothing more can be done with a connection.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Fault {
    /// The kernel has refused to read or write.
    Os(Errno),
    /// What the other side has sent, or not.
    Said(Loss),
}

impl From<Errno> for Fault {
    fn from(error: Errno) -> Self {
        Self::Os(error)
    }
}

impl From<std::io::Error> for Fault {
    fn from(error: std::io::Error) -> Self {
        Self::Os(Errno::from_io_error(&error).unwrap_or(Errno::IO))
    }
}

impl From<Damaged> for Fault {
    fn from(damaged: Damaged) -> Self {
        Self::Said(Loss::new("damaged", damaged.0))
    }
}

impl From<Fault> for Loss {
    fn from(fault: Fault) -> Self {
        match fault {
            Fault::Said(loss) => loss,
            Fault::Os(Errno::CONNRESET | Errno::PIPE | Errno::BADF) => Self::closed(),
            Fault::Os(error) => Self::new(
                "unreachable",
                format!("cannot be reached any more ({})", words(&error.into())),
            ),
        }
    }
}

/// What an error means, without its number.
pub(crate) fn words(error: &std::io::Error) -> String {
    let text = error.to_string();
    let text = text.split(" (os error").next().unwrap_or_default();
    text.trim_start_matches("failed to lookup address information: ")
        .to_owned()
}
