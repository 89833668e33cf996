//! Terminals: ours, and those that we make for workers.

use std::ffi::OsString;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::fs::OFlags;
use rustix::io::Errno;
use rustix::pty::{OpenptFlags, ioctl_tiocgptpeer, openpt, unlockpt};
use rustix::stdio::{stderr, stdin, stdout};
use rustix::termios::{
    LocalModes, OptionalActions, OutputModes, Winsize, isatty, tcgetattr, tcgetwinsize, tcsetattr,
    tcsetwinsize,
};

use crate::mux::screen::{Size, width};

/// The smallest width that a worker's terminal gets.
const FEWEST_COLUMNS: u16 = 20;
/// What a terminal takes for the end of its input, as often as workers may look for it.
const ENDS: [u8; 256] = [4; 256];

/// Opens a pseudo terminal: first the end that we read, then the end that the worker writes to. It has the size of
/// our terminal, without the width of the prefix.
///
/// It does not echo and does not convert line feeds, so that we read the worker's bytes unchanged.
///
/// [pty(7)](https://man7.org/linux/man-pages/man7/pty.7.html)
pub(crate) fn open_terminal(prefix: &[u8]) -> Result<(OwnedFd, OwnedFd), Errno> {
    let pair = open_pair(OpenptFlags::RDWR)?;
    if let Some(size) = own_size() {
        set_size(pair.0.as_fd(), size, prefix);
    }
    Ok(pair)
}

fn open_pair(access: OpenptFlags) -> Result<(OwnedFd, OwnedFd), Errno> {
    let flags = OpenptFlags::NOCTTY | OpenptFlags::CLOEXEC;
    let ours = openpt(OpenptFlags::RDWR | flags)?;
    unlockpt(&ours)?;
    let theirs = ioctl_tiocgptpeer(&ours, access | flags)?;
    let mut modes = tcgetattr(&theirs)?;
    modes.output_modes.remove(OutputModes::OPOST);
    modes.local_modes.remove(LocalModes::ECHO);
    tcsetattr(&theirs, OptionalActions::Now, &modes)?;
    Ok((ours, theirs))
}

/// A terminal that workers have as stdin to ask for its size, which is that of ours (`stty size`).
///
/// They cannot read from it, as under `nohup`. Something to read is there nevertheless, because GNU readline waits for
/// it before it reads. It is the end of the input, for a debugger that opens `/dev/stdin`.
pub(crate) struct Unreadable {
    ours: OwnedFd,
    theirs: OwnedFd,
}

impl Unreadable {
    pub(crate) fn open() -> Result<Self, Errno> {
        let (ours, theirs) = open_pair(OpenptFlags::from_bits_retain(OFlags::WRONLY.bits()))?;
        rustix::io::write(&ours, &ENDS)?;
        let terminal = Self { ours, theirs };
        terminal.resize();
        Ok(terminal)
    }

    /// Gives it the present size of ours.
    pub(crate) fn resize(&self) {
        if let Some(size) = own_size() {
            set_size(self.ours.as_fd(), size, b"");
        }
    }
}

impl AsFd for Unreadable {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.theirs.as_fd()
    }
}

/// Size of our terminal; `None` if no standard stream is one.
pub(super) fn own_size() -> Option<Size> {
    let terminal = [stdout(), stderr(), stdin()].into_iter().find(|fd| isatty(fd));
    terminal.map(size_of)
}

/// Whether our terminal understands cursor movements. The one that a notebook makes for the commands of a cell does
/// not, whatever `TERM` says; in Colab, tmux has a real one.
pub fn can_move_cursor() -> bool {
    let is_dumb = std::env::var_os("TERM").is_none_or(|kind| kind.is_empty() || kind == "dumb");
    let is_colab = |(name, _): (OsString, _)| name.as_encoded_bytes().starts_with(b"COLAB_");
    let is_set = |name| std::env::var_os(name).is_some();
    !is_dumb && !is_set("JPY_PARENT_PID") && (is_set("TMUX") || !std::env::vars_os().any(is_colab))
}

/// Size of a terminal; 80 by 24 if it has none.
pub(super) fn size_of(fd: BorrowedFd<'_>) -> Size {
    let known = tcgetwinsize(fd)
        .ok()
        .filter(|size| size.ws_col > 0 && size.ws_row > 0);
    known.map_or(
        Size {
            columns: 80,
            rows: 24,
        },
        |size| Size {
            columns: size.ws_col,
            rows: size.ws_row,
        },
    )
}

/// Sets the size of a worker's terminal: that of ours, without the width of the prefix.
pub(super) fn set_size(fd: BorrowedFd<'_>, size: Size, prefix: &[u8]) {
    let columns = size.columns.saturating_sub(width(prefix) as u16);
    let size = Winsize {
        ws_row: size.rows,
        ws_col: columns.max(FEWEST_COLUMNS),
        ws_xpixel: 0,
        ws_ypixel: 0,
    };
    // If this fails, the worker only wraps its lines too early or too late.
    let _ = tcsetwinsize(fd, size);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_terminal_passes_bytes_on_unchanged() {
        let (ours, theirs) = open_terminal(b"").unwrap();
        assert!(isatty(&theirs));
        rustix::io::write(&theirs, b"a\nb\tc\r\n").unwrap();
        let mut text = [0; 32];
        let count = rustix::io::read(&ours, &mut text).unwrap();
        assert_eq!(&text[..count], b"a\nb\tc\r\n");
        drop(theirs);
        assert_eq!(
            rustix::io::read(&ours, &mut text),
            Err(Errno::IO),
            "the end of its output"
        );
    }

    #[test]
    fn a_terminal_that_cannot_be_read_has_an_end_for_whoever_opens_it_anew() {
        let terminal = Unreadable::open().unwrap();
        let size = Size {
            columns: 100,
            rows: 30,
        };
        set_size(terminal.ours.as_fd(), size, b"");
        assert!(isatty(&terminal));
        assert_eq!(size_of(terminal.as_fd()), size);
        let mut text = [0; 8];
        assert_eq!(rustix::io::read(&terminal, &mut text), Err(Errno::BADF));
        let again = ioctl_tiocgptpeer(&terminal.ours, OpenptFlags::RDWR | OpenptFlags::NOCTTY).unwrap();
        for _ in 0..3 {
            assert_eq!(rustix::io::read(&again, &mut text), Ok(0));
        }
    }

    #[test]
    fn a_worker_has_the_columns_beside_its_prefix() {
        let (ours, theirs) = open_terminal(b"").unwrap();
        let size = Size {
            columns: 100,
            rows: 30,
        };
        set_size(ours.as_fd(), size, b"\x1b[32m[rank 1]\x1b[0m ");
        assert_eq!(
            size_of(theirs.as_fd()),
            Size {
                columns: 91,
                rows: 30
            }
        );
        set_size(ours.as_fd(), size, &[b'x'; 300]);
        assert_eq!(size_of(theirs.as_fd()).columns, FEWEST_COLUMNS);
    }
}
