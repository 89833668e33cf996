//! The socket of a warm server, in the server: takes calls, and watches the branches that it has forked for them.

use std::collections::VecDeque;
use std::fs::File;
use std::os::fd::{AsFd, IntoRawFd, OwnedFd};
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustix::net::SocketFlags;
use rustix::pipe::{PipeFlags, pipe_with};
use rustix::process::{Pid, PidfdFlags, Rlimit, getpid, getrlimit, pidfd_open, set_child_subreaper, setpgid};

use super::branches::Branches;
use super::reach::Reach;
use super::request::{Purpose, Request};
use super::standing::Standing;
use crate::error::Error;
use crate::folder::PrivateFolder;
use crate::forkserver::link::Link;
use crate::forkserver::message::Report;
use crate::forkserver::order::Trace;
use crate::forkserver::wire::Wire as _;
use crate::forkserver::{pages, socket};
use crate::peer::Peer;
use crate::poller::{Poller, is_readable};
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

/// A program that wants the server to stay.
struct Holder {
    number: u64,
    call: OwnedFd,
}

/// A call that the server has to answer: a job wants workers, or a program wants the server to stay.
pub struct Call {
    connection: OwnedFd,
    file: File,
    /// What the caller wants.
    pub request: Request,
    /// Pid of the command.
    command: i32,
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
    ends: Option<Ends>,
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

/// The descriptors, which a branch closes.
struct Ends {
    folder: PrivateFolder,
    poller: Poller,
    listener: OwnedFd,
    reach: Option<Reach>,
    session: Option<OwnedFd>,
    /// SIGTERM, by which a user may end the server, and SIGCHLD. They are blocked once the modules are imported.
    intake: OwnedFd,
    /// In the order of their calls.
    silent: VecDeque<Silent>,
    branches: Branches,
    holders: Vec<Holder>,
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
            ends: Some(Ends {
                folder,
                poller,
                listener,
                reach,
                session,
                intake,
                silent: VecDeque::new(),
                branches: Branches::default(),
                holders: Vec::new(),
            }),
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

    /// What this server is, for [`Purpose::Tell`].
    pub fn set_about(&mut self, about: Vec<u8>) {
        self.about = about;
    }

    /// Waits for a call that needs an answer. `None`: the server has to end.
    pub fn next_call(&mut self) -> Result<Option<Call>, Error> {
        loop {
            let now = Instant::now();
            let spared = self.spared();
            let Some(ends) = &mut self.ends else {
                return Err(Error::Forked);
            };
            ends.branches.kill_late(now);
            ends.branches.clear_some(&spared, now);
            ends.forget_late_callers(now);
            let idle_until = self.idle_since + self.stay;
            let has_jobs = !ends.branches.are_over();
            let is_needed = has_jobs || !ends.holders.is_empty() || !self.was_called;
            let is_over = self.is_closing && ends.holders.is_empty();
            if !has_jobs && (is_over || (!is_needed && idle_until <= now)) {
                self.close();
                return Ok(None);
            }
            let silent = ends.silent.front().map(|silent| silent.due);
            let idle = (!is_needed).then_some(idle_until);
            let due = [silent, ends.branches.due(), idle].into_iter().flatten().min();
            let tokens = ends
                .poller
                .wait(due.map(|due| due.saturating_duration_since(now)))?;
            for token in tokens {
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
                        self.check_reach();
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

    /// Takes no more calls if no caller finds the socket any more: the next job starts another server.
    fn check_reach(&mut self) {
        let reach = self.ends.as_ref().and_then(|ends| ends.reach.as_ref());
        if reach.is_some_and(|reach| !reach.holds(&self.name)) {
            self.close();
        }
    }

    /// Takes no more calls.
    pub fn close(&mut self) {
        let was_closing = std::mem::replace(&mut self.is_closing, true);
        if let Some(ends) = &mut self.ends {
            // Another socket may have come in the place of ours.
            let is_ours = ends.reach.as_ref().is_none_or(|reach| reach.holds(&self.name));
            if !was_closing && is_ours {
                ends.folder.unlink(&self.name);
            }
            ends.poller.forget(&ends.listener);
            for silent in ends.silent.drain(..) {
                ends.poller.forget(&silent.call);
            }
            for holder in ends.holders.drain(..) {
                ends.poller.forget(&holder.call);
            }
            if let Some(reach) = ends.reach.take() {
                ends.poller.forget(&reach);
            }
            if let Some(session) = ends.session.take() {
                ends.poller.forget(&session);
            }
        }
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
        let _ = socket::send(&call.connection, b"stays", &[], false);
        self.add_holder(call.connection)
    }

    /// Stays until the program at the other end of a connection hangs up.
    pub fn add_holder(&mut self, call: OwnedFd) -> Result<(), Error> {
        let number = self.take_number();
        let ends = self.ends.as_mut().ok_or(Error::Forked)?;
        ends.poller.watch_end(&call, number)?;
        ends.holders.push(Holder { number, call });
        Ok(())
    }

    /// Numbers of copies of the connections with programs that want this server to stay.
    pub fn holders(&self) -> Result<Vec<i32>, Error> {
        let holders = self.ends.iter().flat_map(|ends| &ends.holders);
        holders.map(|holder| copy_for_another(&holder.call)).collect()
    }

    fn take_number(&mut self) -> u64 {
        self.next_number += 2;
        self.next_number - 2
    }

    /// Takes over a call from the server that was here before, by the numbers of its descriptors.
    pub fn adopt(&mut self, [call, file, release]: [i32; 3]) -> Result<Option<Call>, Error> {
        let taken = |fd| sys::take_over(fd).map_err(Error::os("take a call"));
        let (call, file, release) = (taken(call)?, File::from(taken(file)?), taken(release)?);
        let Ok(peer) = Peer::of(&call) else {
            return Ok(None);
        };
        let call = self.admit(call, file, &peer);
        Ok(call.map(|call| Call {
            release: Some(release),
            ..call
        }))
    }

    /// Takes those who call. Those who say nothing yet get time for it. Returns a call that needs an answer.
    fn answer(&mut self) -> Option<Call> {
        for _ in 0..MOST_SILENT {
            let ends = self.ends.as_ref()?;
            let call = rustix::net::accept_with(&ends.listener, SocketFlags::CLOEXEC).ok()?;
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
        let Some(ends) = &mut self.ends else { return };
        if ends.poller.watch(&call, number).is_ok() {
            ends.silent.push_back(Silent {
                number,
                call,
                peer,
                due,
            });
        }
        if ends.silent.len() > MOST_SILENT {
            ends.forget_silent(0);
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
            Purpose::Serve | Purpose::Hold => {}
        }
        let call = Call {
            connection: call,
            file,
            request,
            command: peer.pid(),
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

    /// Pid, jobs so far, jobs that run, milliseconds without a job so far and at most, and programs that hold this server; a
    /// line.
    fn account(&self) -> String {
        let count = |count: fn(&Ends) -> usize| self.ends.as_ref().map_or(0, count);
        let (busy, holders) = (
            count(|ends| ends.branches.count()),
            count(|ends| ends.holders.len()),
        );
        let idle = if busy > 0 {
            Duration::ZERO
        } else {
            self.idle_since.elapsed()
        };
        let (idle, stay) = (idle.as_millis(), self.stay.as_millis());
        format!("{} {} {busy} {idle} {stay} {holders}\n", self.pid, self.jobs)
    }

    /// Shows by its name that the server takes calls at once.
    pub fn rename(&mut self, name: &str) {
        if self
            .ends
            .as_ref()
            .is_some_and(|ends| ends.folder.rename(&self.name, name))
        {
            name.clone_into(&mut self.name);
        }
    }

    /// Watches the branch that was forked for a call.
    pub fn forked(&mut self, call: Call, pid: i32) -> Result<(), Error> {
        let number = self.take_number();
        let ends = self.ends.as_mut().ok_or(Error::Forked)?;
        self.jobs += 1;
        ends.branches.add(number, pid, call.connection, &ends.poller)
    }

    /// Reacts to a caller, a holder or a branch. Returns a call that needs an answer.
    fn attend(&mut self, token: u64) -> Option<Call> {
        let ends = self.ends.as_mut()?;
        if let Some(place) = ends.silent.iter().position(|one| one.number == token) {
            let Silent { call, peer, .. } = ends.forget_silent(place)?;
            return self.hear(call, &peer);
        }
        if let Some(place) = ends.holders.iter().position(|holder| holder.number == token) {
            ends.poller.forget(&ends.holders.remove(place).call);
            self.idle_since = Instant::now();
            return None;
        }
        if ends.branches.attend(token, &ends.poller) {
            self.idle_since = Instant::now();
        }
        None
    }

    fn hear_signals(&mut self) {
        let Some(ends) = &self.ends else { return };
        let mut is_told_to_end = false;
        while let Ok(Some(received)) = signal::read_intake(ends.intake.as_fd()) {
            is_told_to_end |= received.signal == libc::SIGTERM;
        }
        if is_told_to_end {
            self.close();
        }
        let spared = self.spared();
        if let Some(ends) = self.ends.as_mut().filter(|_| self.jobs > 0) {
            ends.branches.reap(&spared);
        }
    }

    /// The children that stay: branches, and the server in place of this one.
    fn spared(&mut self) -> Vec<i32> {
        self.successor = self
            .successor
            .filter(|pid| matches!(try_wait(Target::Pid(*pid), true), Ok(None)));
        let branches = self.ends.iter().flat_map(|ends| ends.branches.pids());
        branches.chain(self.successor).collect()
    }

    /// In the forked child: makes it the branch of a job. Returns its connection with the engine.
    pub fn enter(&mut self, call: Call) -> Result<Link, Error> {
        if self.pid == own_pid() {
            return Err(Error::Forked);
        }
        self.ends = None;
        set_child_subreaper(Some(getpid())).map_err(Error::os("prctl"))?;
        setpgid(None, None).map_err(Error::os("setpgid"))?;
        let trace = Arc::clone(&self.trace);
        Link::of_branch(call.connection, trace, call.command, call.release)
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
        let _ = socket::send(&self.connection, &text, &[], false);
    }

    /// Tells the engine that the imports begin anew.
    pub fn defer(&self) {
        if self.request.purpose == Purpose::Serve {
            let _ = socket::send(&self.connection, &Report::Importing.encode(), &[], false);
        }
    }

    /// Numbers of copies of the connection and of the request, which another program can take over, and of a descriptor
    /// that it closes when this server is not needed for the call any more.
    pub fn pass_on(&mut self) -> Result<[i32; 3], Error> {
        let (end, release) = pipe_with(PipeFlags::CLOEXEC).map_err(Error::os("make a pipe"))?;
        self.handed_over = Some(end);
        Ok([
            copy_for_another(&self.connection)?,
            copy_for_another(&self.file)?,
            release.into_raw_fd(),
        ])
    }

    fn is_gone(&self) -> bool {
        socket::receive(&self.connection).is_err()
    }
}

impl Ends {
    /// Hangs up on callers that say nothing.
    fn forget_late_callers(&mut self, now: Instant) {
        while self.silent.front().is_some_and(|silent| silent.due <= now) {
            self.forget_silent(0);
        }
    }

    fn forget_silent(&mut self, place: usize) -> Option<Silent> {
        let silent = self.silent.remove(place)?;
        self.poller.forget(&silent.call);
        Some(silent)
    }
}

/// The number of a copy of a descriptor, which another program can take over.
fn copy_for_another(fd: impl AsFd) -> Result<i32, Error> {
    let copy = rustix::io::dup(fd).map_err(Error::os("copy a descriptor"))?;
    Ok(copy.into_raw_fd())
}
