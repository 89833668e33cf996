//! Who proves that the workers of a branch have left nothing.
//!
//! What they leave is below the branch, out of reach of agent and guard. The branch tells over its link when nothing is
//! left; if it was killed, its warm server does, which holds the same end of the link.

use std::os::fd::{AsFd, OwnedFd};
use std::time::{Duration, Instant};

use rustix::fs::{OFlags, fcntl_getfl, fcntl_setfl};
use rustix::net::{Shutdown, shutdown};

use super::message::Report;
use super::socket;
use super::wire::Wire as _;
use crate::peer::Peer;
use crate::poller::{Poller, wait_readable};

/// What is known about the processes that a branch leaves when it dies.
#[derive(Debug, Default)]
pub(crate) enum Estate {
    /// It lives.
    #[default]
    Owned,
    /// There are none.
    Settled,
    /// The warm server ends them, and tells over this link when none is left.
    Open(OwnedFd),
    /// The warm server is dead, too, or cannot end them.
    Unknown,
}

impl Estate {
    /// Reads what the warm server tells. Returns whether that changes anything.
    pub(super) fn listen(&mut self, poller: &Poller) -> bool {
        let Self::Open(link) = self else { return false };
        let Some(is_clear) = hear(link) else { return false };
        poller.forget(&*link);
        if is_clear {
            note_workers(&*link, false);
        }
        *self = if is_clear { Self::Settled } else { Self::Unknown };
        true
    }
}

/// Whether nothing is left; `None` if that is not known yet.
fn hear(link: &OwnedFd) -> Option<bool> {
    loop {
        match socket::receive(link) {
            Ok(None) => return None,
            Ok(Some((bytes, _))) if Report::decode(&bytes) == Some(Report::Cleared) => return Some(true),
            Ok(Some(_)) => {}
            Err(_) => return Some(false),
        }
    }
}

/// Notes whether the branch has workers, or may have left something. Agent and guard share the socket, and so this flag,
/// which has no other use here: we never wait on this socket.
pub(super) fn note_workers(link: impl AsFd, has_workers: bool) {
    let flags = if has_workers {
        OFlags::NONBLOCK
    } else {
        OFlags::empty()
    };
    let _ = fcntl_setfl(link, flags);
}

/// Lets the branch know that nobody is there any more who gives it orders.
pub(crate) fn hang_up(link: impl AsFd) {
    // Others have copies, so it is not enough to close this one.
    let _ = shutdown(link, Shutdown::Write);
}

/// The warm server that was called, while it is there.
pub(crate) fn listener(link: impl AsFd) -> Option<i32> {
    Peer::of(link).ok().map(|peer| peer.pid())
}

/// For a guard whose agent was killed: waits until nothing is left below the branch. Returns whether that is proved. The
/// caller has hung up.
pub(crate) fn is_cleared(link: &OwnedFd, patience: Duration) -> bool {
    let deadline = Instant::now() + patience;
    if fcntl_getfl(link).is_ok_and(|flags| !flags.contains(OFlags::NONBLOCK)) {
        return true;
    }
    loop {
        if let Some(is_clear) = hear(link) {
            return is_clear;
        }
        if !wait_readable(
            &[link.as_fd()],
            deadline.saturating_duration_since(Instant::now()),
        ) {
            return false;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SOON: Duration = Duration::from_secs(10);

    #[test]
    fn only_who_has_looked_tells_that_nothing_is_left() {
        let died = Report::Refused { text: Vec::new() }.encode();
        for (told, expected) in [
            (&[Report::Cleared.encode()][..], true),
            (&[died.clone(), Report::Cleared.encode()], true),
            (&[died], false),
            (&[], false),
        ] {
            let (link, theirs) = socket::pair().unwrap();
            // Without workers nothing can be left.
            assert!(is_cleared(&link, SOON));
            note_workers(&link, true);
            for one in told {
                socket::send(&theirs, one, &[], false).unwrap();
            }
            hang_up(&link);
            assert!(socket::receive(&theirs).is_err());
            drop(theirs);
            assert_eq!(is_cleared(&link, SOON), expected, "{told:?}");
        }
    }

    #[test]
    fn who_tells_nothing_is_not_waited_for_for_ever() {
        let (link, _theirs) = socket::pair().unwrap();
        note_workers(&link, true);
        assert!(!is_cleared(&link, Duration::from_millis(1)));
    }
}
