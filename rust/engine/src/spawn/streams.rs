//! The standard streams of workers.

use std::ffi::CStr;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd};
use std::sync::{Arc, OnceLock};

use rustix::fs::{FallocateFlags, Mode, OFlags, fallocate};
use rustix::io::{DupFlags, Errno, dup3, fcntl_dupfd_cloexec, ioctl_fionbio};
use rustix::pipe::{PipeFlags, pipe_with};

use crate::event::{Stage, StartFailure};
use crate::mux::{Unreadable, open_log, open_output, open_terminal};
use crate::spec::{Stdio, WorkerSpec};
use crate::sys::clone::StdioSource;

/// Room for a traceback followed by one of torch's.
const LAST_WORDS_BYTES: u64 = 16 * 1024;

/// Our ends of a worker's output.
#[derive(Default)]
pub(crate) struct Ends {
    /// Read ends of stdout and stderr, if the spec asks for pipes or logs.
    pub(crate) pipes: [Option<OwnedFd>; 2],
    /// Log files of stdout and stderr.
    pub(crate) files: [Option<OwnedFd>; 2],
}

/// Three descriptors of ours that hold a worker's streams until it takes them. Their numbers are above those of the
/// streams.
pub(super) struct Slots {
    null: OwnedFd,
    /// One for all threads that start workers, so that it has its new size before any worker hears of that.
    unreadable: Arc<OnceLock<Unreadable>>,
    parked: [OwnedFd; 3],
    busy: [bool; 3],
}

impl Slots {
    pub(super) fn new() -> io::Result<Self> {
        Self::sharing(Arc::default())
    }

    /// Slots for another thread.
    pub(super) fn twin(&self) -> io::Result<Self> {
        Self::sharing(Arc::clone(&self.unreadable))
    }

    fn sharing(unreadable: Arc<OnceLock<Unreadable>>) -> io::Result<Self> {
        let null = rustix::fs::open(c"/dev/null", OFlags::RDWR | OFlags::CLOEXEC, Mode::empty())?;
        let park = || fcntl_dupfd_cloexec(&null, 3);
        Ok(Self {
            parked: [park()?, park()?, park()?],
            null,
            unreadable,
            busy: [false; 3],
        })
    }

    /// The child keeps descriptors below this number when it leaves our table.
    pub(super) fn first_unkept(&self) -> u32 {
        self.parked
            .iter()
            .map(|slot| slot.as_raw_fd() as u32 + 1)
            .max()
            .unwrap_or(3)
    }

    /// Opens the standard streams of a worker. After a failure, streams already placed stay until they are
    /// released.
    pub(super) fn place(
        &mut self,
        spec: &WorkerSpec,
        ends: &mut Ends,
    ) -> Result<[StdioSource; 3], StartFailure> {
        let mut sources = [StdioSource::Same; 3];
        for (stream, stdio) in spec.stdio.iter().enumerate() {
            sources[stream] = self
                .place_stream(stream, stdio, spec, ends)
                .map_err(|errno| StartFailure {
                    stage: Stage::Stdio,
                    errno: errno.raw_os_error(),
                    path: match stdio {
                        Stdio::File { path, .. } => Some(path.clone()),
                        Stdio::Log { path, .. } => path.clone(),
                        _ => None,
                    },
                })?;
        }
        Ok(sources)
    }

    fn place_stream(
        &mut self,
        stream: usize,
        stdio: &Stdio,
        spec: &WorkerSpec,
        ends: &mut Ends,
    ) -> Result<StdioSource, Errno> {
        match stdio {
            Stdio::Inherit => return Ok(StdioSource::Same),
            Stdio::Stdout => return Ok(StdioSource::Stdout),
            Stdio::Null => {}
            Stdio::Unreadable => {
                if let Some(terminal) = unreadable(&self.unreadable) {
                    self.busy[stream] = true;
                    dup3(terminal, &mut self.parked[stream], DupFlags::CLOEXEC)?;
                }
            }
            Stdio::File { path, append } => {
                let file = open_stream(path, stream == 0, *append)?;
                let has_errors = stream == 2 || (stream == 1 && spec.stdio[2] == Stdio::Stdout);
                if *append && has_errors {
                    reserve(&file);
                }
                self.fill_slot(stream, file.as_fd())?;
            }
            Stdio::Fd(fd) => {
                let source = borrow(*fd)?;
                self.fill_slot(stream, source.as_fd())?;
            }
            Stdio::Pipe | Stdio::Log { .. } => {
                let mut pair = None;
                if let Stdio::Log {
                    path,
                    terminal,
                    prefix,
                    ..
                } = stdio
                {
                    ends.files[stream - 1] = path.as_deref().map(open_log).transpose()?;
                    let prefix = prefix.as_ref().unwrap_or(&spec.prefix);
                    // The machine may have no terminal left. A worker on a pipe is better than no worker.
                    pair = terminal.then(|| open_terminal(prefix).ok()).flatten();
                }
                let (read, write) = match pair {
                    Some(pair) => pair,
                    None => pipe_with(PipeFlags::CLOEXEC)?,
                };
                ioctl_fionbio(&read, true)?;
                self.fill_slot(stream, write.as_fd())?;
                ends.pipes[stream - 1] = Some(read);
            }
        }
        Ok(StdioSource::Slot(self.parked[stream].as_raw_fd()))
    }

    fn fill_slot(&mut self, stream: usize, source: BorrowedFd<'_>) -> Result<(), Errno> {
        self.busy[stream] = true;
        dup3(source, &mut self.parked[stream], DupFlags::CLOEXEC)
    }

    /// Our terminal may have another size.
    pub(super) fn resize(&self) {
        if let Some(terminal) = self.unreadable.get() {
            terminal.resize();
        }
    }

    /// Releases what was placed. A slot that kept a pipe's write end would hide the end of that stream.
    pub(super) fn release(&mut self) {
        for (slot, busy) in self.parked.iter_mut().zip(&mut self.busy) {
            if std::mem::take(busy) {
                // Replacing a descriptor by /dev/null cannot fail short of a kernel bug.
                let _ = dup3(&self.null, slot, DupFlags::CLOEXEC);
            }
        }
    }
}

/// `None` if none can be made: a worker that cannot ask for the size is better than no worker.
fn unreadable(terminal: &OnceLock<Unreadable>) -> Option<&Unreadable> {
    if terminal.get().is_none() {
        // Fails only if another thread has been quicker.
        let _ = terminal.set(Unreadable::open().ok()?);
    }
    terminal.get()
}

fn open_stream(path: &CStr, input: bool, append: bool) -> Result<OwnedFd, Errno> {
    // Opens without waiting: a FIFO would hold up the whole group. The worker's own calls wait as usual.
    let file = if input {
        let flags = OFlags::RDONLY | OFlags::CLOEXEC | OFlags::NOCTTY | OFlags::NONBLOCK;
        rustix::fs::open(path, flags, Mode::empty())?
    } else if append {
        open_log(path)?
    } else {
        // Append mode even for an emptied file: a worker's children may open it a second time.
        open_output(path, OFlags::TRUNC | OFlags::APPEND)?
    };
    ioctl_fionbio(&file, false)?;
    Ok(file)
}

/// Reserves room for a worker's last words while the disk has some. If the disk is full by then, they would be
/// lost.
fn reserve(file: &OwnedFd) {
    // A failure is fine: some file systems cannot reserve room, and a full one has none.
    let _ = fallocate(file, FallocateFlags::KEEP_SIZE, 0, LAST_WORDS_BYTES);
}

/// A copy of a descriptor that the caller named by number.
pub(super) fn borrow(fd: RawFd) -> Result<OwnedFd, Errno> {
    crate::sys::duplicate(fd).map_err(|error| Errno::from_io_error(&error).unwrap_or(Errno::BADF))
}

#[cfg(test)]
mod tests;
