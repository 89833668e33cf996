//! Why a connection has ended.

use std::time::Duration;

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

/// A time in words for the user, rounded to a hundredth of a second.
pub(crate) fn seconds(time: Duration) -> String {
    format!("{} s", (time.as_secs_f64() * 100.0).round() / 100.0)
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_are_rounded() {
        let texts = [0, 4_000_000, 749_481_640, 1_500_000_000, 15_000_000_000]
            .map(|ns| seconds(Duration::from_nanos(ns)));
        assert_eq!(texts, ["0 s", "0 s", "0.75 s", "1.5 s", "15 s"]);
    }
}
