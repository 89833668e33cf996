//! The socket of a warm server, in the server: takes calls, and watches the branches that it has forked for them.

use std::collections::VecDeque;
use std::fs::File;
use std::os::fd::{AsFd, IntoRawFd, OwnedFd};
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustix::event::PollFlags;
use rustix::net::SocketFlags;
use rustix::pipe::{PipeFlags, pipe_with};
use rustix::process::{Pid, PidfdFlags, Rlimit, getpid, getrlimit, pidfd_open, set_child_subreaper, setpgid};

use super::branches::Branches;
use super::identity::Standing;
use super::reach::Reach;
use super::request::{Purpose, Request};
use crate::error::Error;
use crate::folder::PrivateFolder;
use crate::forkserver::link::Link;
use crate::forkserver::message::Report;
use crate::forkserver::order::Trace;
use crate::forkserver::wire::Wire as _;
use crate::forkserver::{pages, socket};
use crate::peer::Peer;
use crate::poller::{Poller, is_readable, poll_once};
use crate::sys::signal::{self, SignalSet};
use crate::sys::wait::{Target, try_wait};
use crate::sys::{self, own_pid, session_leader};

const LISTENER: u64 = 0;
const SESSION: u64 = 1;
const SIGNAL: u64 = 2;
const REACH: u64 = 3;
/// The end of a branch has an even token from here on, the end of its job the odd token after it. A program that holds
/// the server, and a caller that has said nothing yet, have an even token, too.
const FIRST_NUMBER: u64 = 4;
/// Time that a caller has to say what it wants.
const CALL_PATIENCE: Duration = Duration::from_millis(500);
/// The most callers that have said nothing yet. A further one takes the place of the first.
const MOST_SILENT: usize = 64;

/// A caller that has said nothing yet.
struct Silent {
    number: u64,
    call: OwnedFd,
    peer: Peer,
    due: Instant,
}

/// A further connection of a call that has not come yet.
struct Part {
    number: u64,
    connection: OwnedFd,
    /// Pid of the caller.
    command: i32,
    due: Instant,
}

/// A program that wants the server to stay.
struct Holder {
    number: u64,
    call: OwnedFd,
}

/// A call that the server has to answer: a job wants workers, or a program wants the server to stay.
pub struct Call {
    /// One for each branch that is still to be forked; for a program that wants the server to stay one.
    connections: VecDeque<OwnedFd>,
    file: File,
    /// What the caller wants.
    pub request: Request,
    /// Pid of the command.
    command: i32,
    /// Number of the job here; 0: it has no branch yet.
    job: u64,
    /// Closed once the engine has met the branch, or nobody waits for one any more. The server before this one, which
    /// has taken the call, stays until then: the branch has to descend from the server that was called.
    release: Option<OwnedFd>,
    /// Our end of that, if another server was asked to go on with the call.
    handed_over: Option<OwnedFd>,
}

/// The socket of a warm server and the branches of its jobs.
pub struct Door {
    pid: i32,
    key: Vec<u8>,
    name: String,
    folder: PrivateFolder,
    poller: Poller,
    listener: OwnedFd,
    reach: Option<Reach>,
    session: Option<OwnedFd>,
    /// SIGTERM, by which a user may end the server, and SIGCHLD. They are blocked once the modules are imported.
    intake: OwnedFd,
    /// In the order of their calls.
    silent: VecDeque<Silent>,
    parts: Vec<Part>,
    /// Calls that came while we looked for the parts of another one.
    waiting: VecDeque<Call>,
    branches: Branches,
    holders: Vec<Holder>,
    next_number: u64,
    jobs: u64,
    successor: Option<i32>,
    /// The call that the successor goes on with.
    handed_over: Option<Call>,
    stay: Duration,
    idle_since: Instant,
    about: Vec<u8>,
    was_called: bool,
    /// Takes no more calls.
    is_closing: bool,
    open_files: Rlimit,
    /// That of this process before its imports.
    standing: Standing,
    trace: Arc<Trace>,
}

impl Door {
    /// Takes over the descriptor of a socket of [`super::listen`] in the folder `path`. `key`: in what a command has to agree with
    /// this process. This process becomes the subreaper of its branches, and ends with its session.
    pub fn new(fd: i32, path: &Path, name: &str, key: Vec<u8>) -> Result<Self, Error> {
        let listener = sys::take_over(fd).map_err(Error::os("take the socket"))?;
        // Again, so that the kernel names this process to those who connect.
        rustix::net::listen(&listener, 64).map_err(Error::os("listen"))?;
        let folder =
            PrivateFolder::open_existing(path).map_err(Error::os("open the folder of the socket"))?;
        folder.show(name);
        set_child_subreaper(Some(getpid())).map_err(Error::os("prctl"))?;
        sys::clone::reset_library_signals();
        let poller = Poller::new()?;
        poller.watch(&listener, LISTENER)?;
        let leader = Pid::from_raw(session_leader()).filter(|leader| *leader != getpid());
        let intake =
            signal::intake(SignalSet::of(&[libc::SIGTERM, libc::SIGCHLD])).map_err(Error::os("signalfd"))?;
        poller.watch(&intake, SIGNAL)?;
        // A leader that is gone already took its terminal along.
        let session = leader.and_then(|leader| pidfd_open(leader, PidfdFlags::empty()).ok());
        if let Some(session) = &session {
            poller.watch(session, SESSION)?;
        }
        let reach = Reach::watch(path, name);
        if let Some(reach) = &reach {
            poller.watch(reach, REACH)?;
        }
        Ok(Self {
            pid: own_pid(),
            key,
            name: name.to_owned(),
            folder,
            poller,
            listener,
            reach,
            session,
            intake,
            silent: VecDeque::new(),
            parts: Vec::new(),
            waiting: VecDeque::new(),
            branches: Branches::default(),
            holders: Vec::new(),
            next_number: FIRST_NUMBER,
            jobs: 0,
            successor: None,
            handed_over: None,
            stay: Duration::ZERO,
            idle_since: Instant::now(),
            about: Vec::new(),
            was_called: false,
            is_closing: false,
            open_files: getrlimit(rustix::process::Resource::Nofile),
            standing: Standing::own(),
            trace: Arc::default(),
        })
    }

    /// Call this after the imports, as [`Link::settle`]. Also makes forks of this process cheaper.
    pub fn settle(&mut self) -> Result<(), Error> {
        self.trace = Trace::note(&self.open_files)?;
        pages::gather();
        Ok(())
    }

    /// Shows by this name that the server takes calls at once. `about`: what it is, for [`Purpose::Tell`].
    pub fn ready(&mut self, name: &str, about: Vec<u8>) {
        self.about = about;
        if self.folder.rename(&self.name, name) {
            name.clone_into(&mut self.name);
        }
    }

    /// Whether this process is a fork of the server.
    pub fn is_copy(&self) -> bool {
        self.pid != own_pid()
    }

    /// Waits for a call that needs an answer. `None`: the server has to end.
    pub fn next_call(&mut self) -> Result<Option<Call>, Error> {
        loop {
            if let Some(call) = self.waiting.pop_front() {
                return Ok(Some(call));
            }
            let now = Instant::now();
            self.parts.retain(|part| part.due > now);
            let spared = self.spared();
            self.branches.kill_late(now);
            self.branches.clear_some(&spared, now);
            while self.silent.front().is_some_and(|silent| silent.due <= now) {
                self.forget_silent(0);
            }
            let idle_until = self.idle_since + self.stay;
            let has_jobs = !self.branches.are_over();
            let is_needed = has_jobs || !self.holders.is_empty() || !self.was_called;
            let is_over = self.is_closing && self.holders.is_empty();
            if !has_jobs && (is_over || (!is_needed && idle_until <= now)) {
                self.close();
                return Ok(None);
            }
            let silent = self.silent.front().map(|silent| silent.due);
            let idle = (!is_needed).then_some(idle_until);
            let due = [silent, self.branches.due(), idle].into_iter().flatten().min();
            let timeout = due.map(|due| due.saturating_duration_since(now));
            for token in self.poller.wait(timeout)? {
                let call = match token {
                    LISTENER => self.answer(),
                    SESSION => {
                        self.close();
                        None
                    }
                    SIGNAL => {
                        self.hear_signals();
                        None
                    }
                    REACH => {
                        // If no caller finds the socket any more, the next job starts another server.
                        if !self.is_within_reach() {
                            self.close();
                        }
                        None
                    }
                    token => self.attend(token),
                };
                if call.is_some() {
                    return Ok(call);
                }
            }
        }
    }

    /// Takes no more calls.
    pub fn close(&mut self) {
        let was_closing = std::mem::replace(&mut self.is_closing, true);
        // Another socket may have come in the place of ours.
        if !was_closing && self.is_within_reach() {
            self.folder.unlink(&self.name);
        }
        self.poller.forget(&self.listener);
        for silent in self.silent.drain(..) {
            self.poller.forget(&silent.call);
        }
        for holder in self.holders.drain(..) {
            self.poller.forget(&holder.call);
        }
        self.parts.clear();
        self.waiting.clear();
        if let Some(reach) = self.reach.take() {
            self.poller.forget(&reach);
        }
        if let Some(session) = self.session.take() {
            self.poller.forget(&session);
        }
    }

    /// Whether callers find the socket, as far as we know.
    fn is_within_reach(&self) -> bool {
        self.reach.as_ref().is_none_or(|reach| reach.holds(&self.name))
    }

    /// In a forked child that becomes another server: gives it the limits that this server was started with.
    pub fn restore(&self) -> Result<(), Error> {
        self.standing.take().map_err(Error::os("restore the limits"))
    }

    /// Notes the server that was started in place of this one and goes on with a call. This one ends after its jobs, and
    /// once the caller has met the branch that the other one forks.
    pub fn succeed(&mut self, pid: i32, mut call: Call) -> Result<(), Error> {
        self.successor = Some(pid);
        self.close();
        let handed_over = call.handed_over.take();
        self.handed_over = Some(call);
        handed_over.map_or(Ok(()), |end| self.add_holder(end))
    }

    /// Stays until the program that has called hangs up.
    pub fn hold(&mut self, call: Call) -> Result<(), Error> {
        for connection in call.connections {
            let _ = socket::send(&connection, b"stays", &[], false);
            self.add_holder(connection)?;
        }
        Ok(())
    }

    /// Stays until the program at the other end of a connection hangs up.
    pub fn add_holder(&mut self, call: OwnedFd) -> Result<(), Error> {
        let number = self.take_number();
        self.poller.watch_end(&call, number)?;
        self.holders.push(Holder { number, call });
        Ok(())
    }

    /// Numbers of copies of the connections with programs that want this server to stay.
    pub fn holders(&self) -> Result<Vec<i32>, Error> {
        let holders = self.holders.iter();
        holders.map(|holder| copy_for_another(&holder.call)).collect()
    }

    fn take_number(&mut self) -> u64 {
        self.next_number += 2;
        self.next_number - 2
    }

    /// Takes over a call from the server that was here before, by the numbers of its descriptors.
    pub fn adopt(&mut self, fds: &[i32]) -> Result<Option<Call>, Error> {
        let taken = |fd: &i32| sys::take_over(*fd).map_err(Error::os("take a call"));
        let mut fds = fds.iter().map(taken).collect::<Result<Vec<_>, _>>()?.into_iter();
        let (Some(file), Some(release), Some(call)) = (fds.next(), fds.next(), fds.next()) else {
            return Ok(None);
        };
        let Ok(peer) = Peer::of(&call) else {
            return Ok(None);
        };
        let call = self.admit(call, file.into(), &peer);
        Ok(call.map(|mut call| {
            call.connections.extend(fds);
            call.release = Some(release);
            call
        }))
    }

    /// Takes those who call. Those who say nothing yet get time for it. Returns a call that needs an answer.
    fn answer(&mut self) -> Option<Call> {
        for _ in 0..MOST_SILENT {
            let call = rustix::net::accept_with(&self.listener, SocketFlags::CLOEXEC).ok()?;
            // Asked before anything is read: who brings the key of another one's request is not that other one.
            let Ok(peer) = Peer::of(&call) else {
                continue;
            };
            if !is_readable(&call) {
                self.wait_for(call, peer);
            } else if let Some(call) = self.hear(call, &peer) {
                return Some(call);
            }
        }
        None
    }

    /// Gives a caller time to say something.
    fn wait_for(&mut self, call: OwnedFd, peer: Peer) {
        let number = self.take_number();
        let due = Instant::now() + CALL_PATIENCE;
        if self.poller.watch(&call, number).is_ok() {
            self.silent.push_back(Silent {
                number,
                call,
                peer,
                due,
            });
        }
        if self.silent.len() > MOST_SILENT {
            self.forget_silent(0);
        }
    }

    fn hear(&mut self, call: OwnedFd, peer: &Peer) -> Option<Call> {
        let file = Request::receive(&call).ok()?;
        self.admit(call, file, peer)
    }

    /// Answers a call that asks for something simple; returns any other call.
    fn admit(&mut self, call: OwnedFd, file: File, peer: &Peer) -> Option<Call> {
        let request = Request::unpack(&file).ok()?;
        match request.purpose {
            Purpose::Tell => {
                let text = [self.account().as_bytes(), &self.about].concat();
                let _ = socket::send(&call, &text, &[], false);
                return None;
            }
            Purpose::Stop => {
                let _ = socket::send(&call, b"stops", &[], false);
                self.close();
                return None;
            }
            Purpose::Part => {
                self.parts.push(Part {
                    number: request.number,
                    connection: call,
                    command: peer.pid(),
                    due: Instant::now() + CALL_PATIENCE,
                });
                // A caller that never calls must not take our descriptors.
                if self.parts.len() > MOST_SILENT {
                    self.parts.remove(0);
                }
                return None;
            }
            Purpose::Serve | Purpose::Hold => {}
        }
        let mut call = Call {
            connections: VecDeque::from([call]),
            file,
            request,
            command: peer.pid(),
            job: 0,
            release: None,
            handed_over: None,
        };
        if call.is_gone() {
            // The command for which this server began to import has ended: it is not kept.
            if !self.was_called {
                self.close();
            }
            return None;
        }
        call.connections.extend(self.take_parts(&call));
        if call.request.key != self.key {
            call.refuse("was started in another way than this job needs");
            return None;
        }
        self.was_called = true;
        // Zero leaves it to those who have called before.
        if !call.request.stay.is_zero() {
            self.stay = call.request.stay;
        }
        self.idle_since = Instant::now();
        Some(call)
    }

    /// The further connections of a call. Its caller has made all of them before, but we may not have read from all.
    fn take_parts(&mut self, call: &Call) -> Vec<OwnedFd> {
        let of_caller = |silent: &Silent| silent.peer.pid() == call.command && is_readable(&silent.call);
        while let Some(place) = self.silent.iter().position(of_caller) {
            if let Some(Silent { call, peer, .. }) = self.forget_silent(place)
                && let Some(other) = self.hear(call, &peer)
            {
                self.waiting.push_back(other);
            }
        }
        let name = (call.command, call.request.number);
        let is_mine = |part: &mut Part| (part.command, part.number) == name;
        self.parts
            .extract_if(.., is_mine)
            .map(|part| part.connection)
            .collect()
    }

    /// Pid, jobs so far, jobs that run, milliseconds without a job so far and at most, and programs that hold this server; a
    /// line.
    fn account(&self) -> String {
        let (busy, holders) = (self.branches.jobs(), self.holders.len());
        let idle = if busy > 0 {
            Duration::ZERO
        } else {
            self.idle_since.elapsed()
        };
        let (idle, stay) = (idle.as_millis(), self.stay.as_millis());
        format!("{} {} {busy} {idle} {stay} {holders}\n", self.pid, self.jobs)
    }

    /// Watches the branch that was forked for the next connection of a call.
    pub fn forked(&mut self, call: &mut Call, pid: i32) -> Result<(), Error> {
        let connection = call.connections.pop_front().ok_or(Error::Closed)?;
        let number = self.take_number();
        if call.job == 0 {
            self.jobs += 1;
            call.job = self.jobs;
        }
        self.branches.add(number, call.job, pid, connection, &self.poller)
    }

    /// Reacts to a caller, a holder or a branch. Returns a call that needs an answer.
    fn attend(&mut self, token: u64) -> Option<Call> {
        if let Some(place) = self.silent.iter().position(|silent| silent.number == token) {
            let Silent { call, peer, .. } = self.forget_silent(place)?;
            return self.hear(call, &peer);
        }
        if let Some(place) = self.holders.iter().position(|holder| holder.number == token) {
            self.poller.forget(&self.holders.remove(place).call);
            self.idle_since = Instant::now();
        } else if self.branches.attend(token, &self.poller) {
            self.idle_since = Instant::now();
        }
        None
    }

    fn forget_silent(&mut self, place: usize) -> Option<Silent> {
        let silent = self.silent.remove(place)?;
        self.poller.forget(&silent.call);
        Some(silent)
    }

    fn hear_signals(&mut self) {
        let mut is_told_to_end = false;
        while let Ok(Some(received)) = signal::read_intake(self.intake.as_fd()) {
            is_told_to_end |= received.signal == libc::SIGTERM;
        }
        if is_told_to_end {
            self.close();
        }
        let spared = self.spared();
        if self.jobs > 0 {
            self.branches.reap(&spared);
        }
    }

    /// The children that stay: branches, and the server in place of this one.
    fn spared(&mut self) -> Vec<i32> {
        self.successor = self
            .successor
            .filter(|pid| matches!(try_wait(Target::Pid(*pid), true), Ok(None)));
        self.branches.pids().into_iter().chain(self.successor).collect()
    }

    /// In the forked child: makes it the branch of a job, which has no door. Returns its connection with the engine.
    pub fn enter(self, mut call: Call) -> Result<Link, Error> {
        let trace = Arc::clone(&self.trace);
        // The other connections are closed with the call, and those of earlier branches with the door.
        let connection = call.connections.pop_front().ok_or(Error::Closed)?;
        drop(self);
        set_child_subreaper(Some(getpid())).map_err(Error::os("prctl"))?;
        setpgid(None, None).map_err(Error::os("setpgid"))?;
        Link::of_branch(connection, trace, call.command, call.release)
    }
}

impl Call {
    /// Tells the caller why it gets nothing.
    pub fn refuse(&self, why: &str) {
        let text = match self.request.purpose {
            Purpose::Hold => why.as_bytes().to_vec(),
            _ => Report::Refused {
                text: why.as_bytes().to_vec(),
            }
            .encode(),
        };
        self.tell(&text);
    }

    /// Whether a branch is still to be forked for it.
    pub fn wants_branch(&self) -> bool {
        self.request.purpose == Purpose::Serve && !self.connections.is_empty()
    }

    fn tell(&self, text: &[u8]) {
        for connection in &self.connections {
            let _ = socket::send(connection, text, &[], false);
        }
    }

    /// Tells the engine that the imports begin anew.
    pub fn defer(&self) {
        if self.request.purpose == Purpose::Serve {
            self.tell(&Report::Importing.encode());
        }
    }

    /// Numbers of descriptors that another program can take over: a copy of the request, one that the program closes when
    /// this server is not needed for the call any more, and copies of the connections.
    pub fn pass_on(&mut self) -> Result<Vec<i32>, Error> {
        let (end, release) = pipe_with(PipeFlags::CLOEXEC).map_err(Error::os("make a pipe"))?;
        self.handed_over = Some(end);
        let fixed = [copy_for_another(&self.file), Ok(release.into_raw_fd())];
        let connections = self.connections.iter().map(copy_for_another);
        fixed.into_iter().chain(connections).collect()
    }

    /// Whether the caller has hung up. What it has said already stays for the branch.
    fn is_gone(&self) -> bool {
        let has_ended =
            |end: &OwnedFd| poll_once(&[end.as_fd()], PollFlags::RDHUP, Some(Duration::ZERO)) != Ok(false);
        self.connections.front().is_none_or(has_ended)
    }
}

/// The number of a copy of a descriptor, which another program can take over.
fn copy_for_another(fd: impl AsFd) -> Result<i32, Error> {
    let copy = rustix::io::dup(fd).map_err(Error::os("copy a descriptor"))?;
    Ok(copy.into_raw_fd())
}

#[cfg(test)]
mod tests;
