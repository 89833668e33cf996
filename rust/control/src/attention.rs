//! What a hub does for one link at a time: sends, waits for what it needs, and hears its last words.

use std::os::fd::BorrowedFd;
use std::time::{Duration, Instant};

use dsl_engine::poller::{Interest, Poller};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;

use crate::frame::LONGEST;
use crate::link::{House, Link};
use crate::loss::{Fault, Loss};
use crate::shared::{LINK, WRITER, token};

/// Readings of a link that cannot be written any more.
const LAST_READS: usize = 256;
/// How long we wait for the other side's end after ours.
const LINGER: Duration = Duration::from_secs(5);
/// Most bytes of messages that wait for a peer that reads nothing.
const QUEUE_BYTES: usize = 2 * LONGEST;

/// Sends what is queued; false: the link has ended.
pub(crate) fn flush(link: &mut Link, poller: &Poller) -> Result<bool, Fault> {
    if link.is_finished {
        return Ok(true);
    }
    let waits = link.flush()?;
    if waits && link.face.outbox().message_bytes() > QUEUE_BYTES {
        return Err(Fault::Said(Loss::new("stuck", "does not read what it is sent")));
    }
    aim(link, waits, poller)?;
    if link.face.is_closing() && link.is_idle() && !waits {
        link.is_finished = true;
        link.linger_until = Instant::now() + LINGER;
        if let Some(fd) = link.stream.write_fd() {
            poller.forget(fd);
        }
        return Ok(link.stream.finish());
    }
    Ok(true)
}

/// Waits for what a link needs: bytes, unless it is paused, and room if something has to be written.
fn aim(link: &mut Link, waits: bool, poller: &Poller) -> Result<(), Fault> {
    let is_paused = link.face.is_paused();
    if (waits, is_paused) == (link.waits_to_write, link.is_deaf) {
        return Ok(());
    }
    if link.is_deaf && !is_paused {
        link.last_heard = Instant::now(); // we did not listen
    }
    (link.waits_to_write, link.is_deaf) = (waits, is_paused);
    let id = link.face.id;
    let interest = Interest {
        read: !is_paused,
        write: waits,
    };
    let mut reading = interest;
    if let Some(fd) = link.stream.write_fd() {
        reading.write = false;
        let writing = Interest {
            read: false,
            write: waits,
        };
        poller
            .change(fd, token(id, WRITER), writing)
            .map_err(|_| Errno::BADF)?;
    }
    let changed = poller.change(link.stream.read_fd(), token(id, LINK), reading);
    changed.map_err(|_| Errno::BADF.into())
}

/// Reads what has arrived on a link that cannot be written; returns why no more comes, if known.
pub(crate) fn last_words(link: &mut Link, house: &mut House) -> Option<Loss> {
    for _ in 0..LAST_READS {
        if !is_ready(link.stream.read_fd(), PollFlags::IN) {
            return None;
        }
        match link.take(house) {
            Ok(_) => {}
            Err(Fault::Os(_)) => return None,
            Err(fault) => return Some(fault.into()),
        }
    }
    None
}

pub(crate) fn is_write_end_broken(link: &Link) -> bool {
    link.stream
        .write_fd()
        .is_some_and(|fd| is_ready(fd, PollFlags::empty()))
}

/// Whether something can be done with a descriptor now, or it is broken.
fn is_ready(fd: BorrowedFd<'_>, flags: PollFlags) -> bool {
    poll(&mut [PollFd::new(&fd, flags)], Some(&Timespec::default())) == Ok(1)
}
