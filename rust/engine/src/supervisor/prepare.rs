//! Checks and preparations before the first worker of a group is started.

use std::ffi::CString;
use std::os::fd::OwnedFd;
use std::path::Path;
use std::sync::Arc;

use rustix::process::{Resource, Rlimit, setrlimit};

use crate::affinity::{Allowed, validate, validate_nodes};
use crate::bell::Bell;
use crate::error::Error;
use crate::limits::{Limit, Need, preflight};
use crate::mux::{Consoles, Mux, Stream};
use crate::spawn::{all_descriptors, open_files_limit};
use crate::spec::{Console, EnvEntry, LaunchSpec, Stdio, WorkerSpec};
use crate::tree::TOKEN_VARIABLE;

/// Descriptors that the engine and its owner need in addition to those of the workers, as a rule of thumb.
const OWN_FDS: usize = 64;
/// Of these, those that they open when a group has been accepted: for the group, for views, or for a moment.
const LATER_FDS: usize = 14;
/// Those of the orders that a fork server has not taken yet.
const ORDER_FDS: usize = 12;

/// The variable with the job's token, after the tokens of the jobs in which this job runs.
pub(super) fn token_entry(spec: &LaunchSpec, token: &str) -> Result<EnvEntry, Error> {
    let key = TOKEN_VARIABLE.as_bytes();
    let outer = spec.env.iter().rev().find(|entry| entry.key() == key);
    let tokens = match outer {
        Some(outer) if !outer.value().is_empty() => [outer.value(), b":", token.as_bytes()].concat(),
        _ => token.as_bytes().to_vec(),
    };
    Ok(EnvEntry::new(key, &tokens)?)
}

/// The thread that reads the workers' output; `None` if none is passed on.
pub(super) fn log_thread(
    spec: &LaunchSpec,
    wake: &Arc<Bell>,
    consoles: &Arc<Consoles>,
) -> Result<Option<Mux>, Error> {
    let (any, expected) = streams_of(spec);
    consoles.begin();
    any.then(|| {
        Mux::new(
            spec.logs.clone(),
            expected,
            Arc::clone(wake),
            Arc::clone(consoles),
        )
    })
    .transpose()
}

/// Whether the engine reads any stream of the workers, and how many are shown on stdout and on stderr.
fn streams_of(spec: &LaunchSpec) -> (bool, [usize; 2]) {
    let mut expected = [0, 0];
    let mut any = false;
    for stdio in spec.workers.iter().flat_map(|worker| &worker.stdio) {
        if let Stdio::Log { console, .. } = stdio {
            any = true;
            if let Some(console) = console {
                expected[usize::from(*console == Console::Stderr)] += 1;
            }
        }
    }
    (any, expected)
}

/// Number of threads: the reading thread, and one for each of stdout and stderr that shows output.
fn threads_for(spec: &LaunchSpec) -> usize {
    let (any, expected) = streams_of(spec);
    usize::from(any) + expected.iter().filter(|streams| **streams > 0).count()
}

pub(super) fn log_stream(
    spec: &WorkerSpec,
    worker: usize,
    stream: usize,
    fd: OwnedFd,
    file: Option<(CString, OwnedFd)>,
    console: Option<Console>,
) -> Stream {
    let kind = if stream == 0 {
        Console::Stdout
    } else {
        Console::Stderr
    };
    let own_prefix = match &spec.stdio[stream + 1] {
        Stdio::Log { prefix, .. } => prefix.as_ref(),
        _ => None,
    };
    Stream {
        fd,
        worker,
        kind,
        file,
        console,
        prefix: own_prefix.unwrap_or(&spec.prefix).clone(),
        interactive: spec.foreground,
        has_errors: kind == Console::Stderr || spec.stdio[2] == Stdio::Stdout,
    }
}

/// Raises the limit of open files for so many workers of this group.
pub(super) fn raise_limits(spec: &LaunchSpec, workers: usize) -> Result<(), Error> {
    let fds = |stdio: &Stdio| match stdio {
        Stdio::Pipe | Stdio::Log { path: None, .. } => 1,
        Stdio::Log { path: Some(_), .. } => 2,
        _ => 0,
    };
    let of_worker = |worker: &WorkerSpec| worker.stdio.iter().map(fds).sum::<usize>();
    let mut need = Need {
        workers,
        threads: threads_for(spec),
        fds_per_worker: 1 + spec.workers.iter().map(of_worker).max().unwrap_or(0),
        fds_base: OWN_FDS,
    };
    let checked = preflight(&need).or_else(|shortage| {
        if !matches!(shortage.limit, Limit::OpenFiles(_) | Limit::NrOpen(_)) {
            return Err(shortage);
        }
        let is_forked = spec.workers.iter().any(|worker| worker.fork.is_some());
        let later = LATER_FDS + if is_forked { ORDER_FDS } else { 0 };
        let all = all_descriptors().map_or(OWN_FDS, |others| 3 + others.len() + later);
        need.fds_base = need.fds_base.min(all);
        preflight(&need)
    });
    let Some(files) = checked?.nofile else {
        return Ok(());
    };
    let limit = Rlimit {
        current: Some(files),
        maximum: open_files_limit().maximum,
    };
    setrlimit(Resource::Nofile, limit).map_err(Error::os("raise the limit of open files"))
}

pub(super) fn check_binding(spec: &LaunchSpec) -> Result<(), Error> {
    let (cpus, memory) = (spec.binding.requires_cpus(), spec.binding.requires_memory());
    let is_checked =
        |worker: &WorkerSpec| (cpus && !worker.cpus.is_empty()) || (memory && worker.memory.is_some());
    if !spec.workers.iter().any(is_checked) {
        return Ok(());
    }
    let allowed = Allowed::read(Path::new("/")).map_err(Error::os("read the CPU topology"))?;
    for (index, worker) in spec.workers.iter().enumerate() {
        let refused = |error: &dyn std::fmt::Display| Error::Binding(format!("worker {index}: {error}"));
        if cpus && !worker.cpus.is_empty() {
            validate(&worker.cpus, &allowed.cpus).map_err(|error| refused(&error))?;
        }
        if let Some((_, nodes)) = &worker.memory
            && memory
            && !nodes.is_empty()
        {
            validate_nodes(nodes, &allowed.nodes).map_err(|error| refused(&error))?;
        }
    }
    Ok(())
}
