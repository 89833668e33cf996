//! Turns a worker's spec into an order for a fork server.

use std::ffi::CStr;
use std::io;
use std::os::fd::OwnedFd;

use rustix::fs::{CWD, Mode, OFlags};
use rustix::io::Errno;

use super::streams::{Ends, borrow};
use super::{AttemptContext, Spawner, bit_mask, memory_policy};
use crate::event::{Stage, StartFailure};
use crate::forkserver::{Plan, Stderr};
use crate::spec::LaunchSpec;
use crate::sys::clone::StdioSource;

/// An order for a fork server, and our ends of the worker's output.
pub(crate) struct Prepared {
    pub(crate) plan: Plan,
    /// Sent with the order: the engine's directory, the streams, the cgroup's list of processes, the descriptors
    /// that the worker keeps.
    pub(crate) fds: Vec<OwnedFd>,
    pub(crate) pipes: [Option<OwnedFd>; 2],
    pub(crate) files: [Option<OwnedFd>; 2],
}

/// Why there is no order.
pub(crate) enum Unordered {
    /// The worker cannot be started in any way.
    Failed(StartFailure),
    /// We may not search our working directory, so we cannot hand it to a fork server. A program that we execute
    /// ourselves is there already.
    NoDirectory(io::Error),
}

impl Spawner {
    /// Prepares the order for one worker. Opens its descriptors as if we started the worker ourselves.
    pub(crate) fn order(
        &mut self,
        launch: &LaunchSpec,
        worker: usize,
        entry: usize,
        context: &AttemptContext<'_>,
    ) -> Result<Prepared, Unordered> {
        let of_streams = |errno| Unordered::Failed(of_streams(errno));
        let spec = &launch.workers[worker];
        let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let directory = rustix::fs::openat(CWD, c".", flags, Mode::empty());
        let directory = directory.map_err(|errno| Unordered::NoDirectory(errno.into()))?;
        let mut ends = Ends::default();
        let placed = self.slots.place(spec, &mut ends);
        let placed = placed.map_err(Unordered::Failed);
        let gathered = placed.and_then(|stdio| gather(directory, stdio).map_err(of_streams));
        self.slots.release();
        let (mut fds, stderr) = gathered?;
        let cgroup = context.cgroup.and_then(|cgroup| cgroup.list().ok());
        let has_cgroup = cgroup.is_some();
        fds.extend(cgroup);
        let mut kept = spec.keep_fds.clone();
        kept.sort_unstable();
        for fd in &kept {
            fds.push(borrow(*fd).map_err(of_streams)?);
        }
        let memory = spec.memory.as_ref();
        let plan = Plan {
            argv: spec.argv.clone(),
            entry: entry as u32,
            environ: context.env.block(&spec.env).map(CStr::to_owned).collect(),
            cwd: spec.cwd.clone(),
            stderr,
            has_cgroup,
            kept,
            group: if spec.foreground {
                context.own_foreground_group()
            } else {
                0
            },
            open_files: self.open_files,
            cpus: bit_mask(&spec.cpus),
            memory: memory.map(|(mode, nodes)| memory_policy(*mode, nodes)),
            requires_cpus: launch.binding.requires_cpus(),
            requires_memory: launch.binding.requires_memory(),
            mask: self.mask,
        };
        Ok(Prepared {
            plan,
            fds,
            pipes: ends.pipes,
            files: ends.files,
        })
    }
}

/// Our directory, and copies of the worker's placed streams.
fn gather(directory: OwnedFd, stdio: [StdioSource; 3]) -> Result<(Vec<OwnedFd>, Stderr), Errno> {
    let mut fds = vec![directory];
    let mut stderr = Stderr::Own;
    for (stream, source) in (0i32..).zip(stdio) {
        let fd = match source {
            StdioSource::Same => stream,
            StdioSource::Slot(fd) => fd,
            StdioSource::Stdout => {
                stderr = Stderr::Stdout;
                continue;
            }
        };
        fds.push(borrow(fd)?);
    }
    Ok((fds, stderr))
}

fn of_streams(errno: Errno) -> StartFailure {
    StartFailure {
        stage: Stage::Stdio,
        errno: errno.raw_os_error(),
        path: None,
    }
}
