//! The connections of a process: messages, heartbeats and output, served by one thread.
//!
//! A hub is silent until it is started. So an agent can talk to its head first ([`Hub::send_now`], [`Hub::receive`]),
//! then fork, and start the hub in the process that goes on.

use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use dsl_engine::os::spawn_quiet;
use dsl_engine::poller::poll_once;
use dsl_engine::{Error, Recent};
use rustix::event::PollFlags;
use thiserror::Error;

use crate::door::Listener;
use crate::face::{Count, Counted, Face, Orders, SLICE};
use crate::frame::{LONGEST, LONGEST_OF_AGENTS};
use crate::inbox::News;
use crate::link::{House, Link, Shared};
use crate::loss::Loss;
use crate::relay::Relay;
use crate::server::{Core, Order, Settings};
use crate::stream::Stream;

/// How long another process may wait for a port that we close.
const SHUT: Duration = Duration::from_secs(5);

/// Why a talk before the start has failed.
#[derive(Debug, Error, PartialEq, Eq)]
pub enum TalkError {
    /// The connection has ended, or nothing came in time; in words for the user.
    #[error("{0}")]
    Ended(String),
    /// The caller has asked for the end.
    #[error("interrupted")]
    Interrupted,
}

/// The arguments of [`Hub::listen`].
type Asked = (String, u16, Option<bool>);

#[derive(Default)]
struct State {
    is_started: bool,
    is_disowned: bool,
    /// The links that are added before the start.
    early: Vec<Link>,
    /// What was asked of `listen`, and the port.
    ports: Vec<(Asked, u16)>,
    relayed: Option<Arc<Face>>,
}

/// The connections of this process.
pub struct Hub {
    settings: Settings,
    shared: Arc<Shared>,
    orders: Arc<Orders<Order>>,
    /// 1 while the thread runs.
    running: Arc<Count>,
    state: Mutex<State>,
    /// The process that has the thread.
    pid: AtomicU32,
}

impl Hub {
    /// A hub that is not started. Makes descriptors, and no thread.
    pub fn new(settings: Settings) -> Result<Self, Error> {
        let shared = Arc::new(Shared::new()?);
        let orders = Arc::new(Orders::new(Arc::clone(&shared.bell)));
        Ok(Self {
            settings,
            shared,
            orders,
            running: Arc::default(),
            state: Mutex::default(),
            pid: AtomicU32::new(0),
        })
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Serves a connection; `name` is the other side's name for the user.
    pub fn add(&self, stream: Stream, name: String) -> Arc<Face> {
        stream.tune(self.settings.heartbeat);
        let own_address = stream.own_address();
        let face = Arc::new(Face::new(self.shared.new_id(), name, -1, None, own_address));
        let is_head = self.settings.console.is_some();
        let longest = if is_head { LONGEST_OF_AGENTS } else { LONGEST };
        let link = Link::new(Arc::clone(&face), stream, longest, &self.shared.links);
        let mut state = self.state();
        if state.is_started {
            self.orders.give(Order::Begin(Box::new(link)));
        } else {
            state.early.push(link);
        }
        face
    }

    /// Lets agents connect by TCP at a port; returns the port. The same call again changes nothing. `address`: one of
    /// this machine; empty: every one. `port`: 0 for any free one. `keyed`: agents are refused unless they have a key
    /// from their user (true), or have none (false); `None`: it is not checked.
    pub fn listen(&self, address: &str, port: u16, keyed: Option<bool>) -> std::io::Result<u16> {
        let mut state = self.state();
        let asked = (address.to_owned(), port, keyed);
        if let Some((_, port)) = state.ports.iter().find(|(known, _)| *known == asked) {
            return Ok(*port);
        }
        let listener = Listener::new(self.shared.new_id(), address, port, keyed)?;
        let port = listener.port;
        state.ports.push((asked, port));
        self.orders.give(Order::Listen(listener));
        Ok(port)
    }

    /// Closes a port. Returns when another process can listen there; links that came in by it stay.
    pub fn unlisten(&self, port: u16) {
        let mut state = self.state();
        state.ports.retain(|(_, known)| *known != port);
        if !state.is_started {
            self.orders
                .retract(|order| matches!(order, Order::Listen(one) if one.port == port));
            return;
        }
        drop(state);
        let open = Arc::default();
        self.orders.give(Order::Unlisten(port, Counted::new(&open)));
        open.wait(Some(SHUT), || false);
    }

    /// Lets in agents of a place that know a key; `None`: of every place. `count`: number of these agents.
    pub fn expect(&self, place: Option<u32>, key: &[u8], count: usize) {
        self.orders.give(Order::Expect(place, key.to_vec(), count));
    }

    /// A head: sets the number of agents that share the memory for output.
    pub fn share_output(&self, agents: usize) {
        self.shared.agents.store(agents, Ordering::Relaxed);
    }

    /// Takes what has arrived. `Gone` is the last news of a link.
    pub fn read(&self) -> Vec<News> {
        let (news, resumed) = self.shared.inbox.take();
        for face in resumed {
            self.orders.call(&face);
        }
        news
    }

    /// Queues a message, without waiting. Does nothing if the link is lost or being closed.
    pub fn send(&self, face: &Arc<Face>, payload: &[u8]) {
        self.orders.send(face, payload);
    }

    /// Sends what is queued, then ends the connection. Nothing is read any more.
    pub fn close_link(&self, face: &Arc<Face>) {
        self.orders.close(face);
    }

    /// Ends a connection at once, and forgets what it has said. `is_stranger`: the user hears of a stranger.
    pub fn drop_link(&self, face: &Arc<Face>, is_stranger: bool) {
        face.is_closing.store(true, Ordering::SeqCst);
        self.shared.inbox.forget(face);
        self.orders.give(Order::Drop(Arc::clone(face), is_stranger));
    }

    /// Sends a message before the hub is started, and waits until it has gone. `pending` is called now and then; if it
    /// returns true, the call ends.
    pub fn send_now(
        &self,
        face: &Arc<Face>,
        payload: &[u8],
        timeout: Duration,
        mut pending: impl FnMut() -> bool,
    ) -> Result<(), TalkError> {
        face.outbox().message(payload);
        let deadline = Instant::now() + timeout;
        let mut state = self.state();
        if let Some(link) = state.early.iter_mut().find(|link| Arc::ptr_eq(&link.face, face)) {
            return flush_now(link, deadline, &mut pending);
        }
        drop(state);
        self.orders.call(face);
        Ok(())
    }

    /// Waits for a message before the hub is started. `while_heard`: the time begins anew whenever the other side
    /// sends something.
    pub fn receive(
        &self,
        face: &Arc<Face>,
        timeout: Duration,
        while_heard: bool,
        mut pending: impl FnMut() -> bool,
    ) -> Result<Vec<u8>, TalkError> {
        let mut deadline = Instant::now() + timeout;
        let mut state = self.state();
        let mut house = House::new(self.settings.console.is_some(), Arc::clone(&self.shared));
        loop {
            if let Some(payload) = self.shared.inbox.take_first(face) {
                return Ok(payload);
            }
            let Some(link) = state.early.iter_mut().find(|link| Arc::ptr_eq(&link.face, face)) else {
                let name = &face.name;
                return Err(TalkError::Ended(format!("{name} is heard by another thread")));
            };
            if while_heard {
                deadline = link.last_heard + timeout;
            }
            wait(link, PollFlags::IN, deadline, &mut pending)?;
            let taken = link.take(&mut house);
            taken.map_err(|fault| ended(link, &fault.into()))?;
            flush_now(link, deadline, &mut pending)?;
        }
    }

    /// Sends what comes out of two pipes to the head, which shows it.
    pub fn relay(&self, face: &Arc<Face>, stdout: OwnedFd, stderr: OwnedFd) -> std::io::Result<()> {
        let relay = Relay::new(face.id, stdout, stderr)?;
        self.state().relayed = Some(Arc::clone(face));
        self.orders.give(Order::Relay(Box::new(relay)));
        Ok(())
    }

    /// Waits for output; false: the time is over, `pending` has returned true, or the head is gone. An agent waits
    /// until all that was in the pipes is written to the connection. A head waits until all that has arrived is shown.
    pub fn drain(&self, timeout: Option<Duration>, pending: impl FnMut() -> bool) -> bool {
        if self.settings.console.is_some() {
            return self.shared.unshown.wait(timeout, pending);
        }
        let unsent = Arc::default();
        self.orders.give(Order::Drain(Counted::new(&unsent)));
        let is_done = unsent.wait(timeout, pending);
        is_done && self.state().relayed.as_ref().is_some_and(|face| !face.is_lost())
    }

    /// A head: the last output of agents that was shown where stderr is shown.
    pub fn recent(&self) -> Vec<u8> {
        self.shared.recent.get().map(Recent::to_vec).unwrap_or_default()
    }

    /// A head: from now on a socket gets the output of agents, too; see [`dsl_engine::Tee::add`].
    pub fn tee(&self, fd: OwnedFd) -> Result<(), Error> {
        self.shared.tee.get().map_or(Ok(()), |tee| tee.add(fd))
    }

    /// Begins to serve. From here on this process must not fork and go on in the child.
    pub fn start(&self) -> std::io::Result<()> {
        let mut state = self.state();
        if state.is_started || state.is_disowned {
            return Ok(());
        }
        let early = std::mem::take(&mut state.early);
        let (settings, shared) = (self.settings.clone(), Arc::clone(&self.shared));
        let (orders, running) = (Arc::clone(&self.orders), Counted::new(&self.running));
        spawn_quiet("dsl-hub", move || {
            serve(settings, &shared, &orders, early);
            orders.end();
            drop(running);
        })?;
        state.is_started = true;
        self.pid.store(std::process::id(), Ordering::SeqCst);
        Ok(())
    }

    /// Sends what is queued, ends all connections, and waits no longer than this for it.
    pub fn close(&self, timeout: Duration, mut pending: impl FnMut() -> bool) -> std::io::Result<()> {
        self.start()?;
        if self.state().is_disowned {
            return Ok(());
        }
        self.orders.give(Order::Close);
        self.shared.links.wait(Some(timeout), &mut pending);
        self.orders.give(Order::Stop);
        let end = timeout + Duration::from_secs(1);
        self.running.wait(Some(end), pending);
        Ok(())
    }

    /// Closes the descriptors in this process alone: a process forked from it goes on with them.
    pub fn disown(&self) {
        let mut state = self.state();
        state.is_disowned = true;
        for link in state.early.drain(..) {
            link.stream.disown();
        }
        self.orders.end();
    }
}

impl AsFd for Hub {
    /// Readable while [`Hub::read`] returns something.
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.shared.inbox.bell.as_fd()
    }
}

impl AsRawFd for Hub {
    fn as_raw_fd(&self) -> i32 {
        self.as_fd().as_raw_fd()
    }
}

impl Drop for Hub {
    fn drop(&mut self) {
        // In a forked child the thread is missing, and a lock may stay locked for ever.
        if std::process::id() == self.pid.load(Ordering::SeqCst) {
            self.orders.give(Order::Stop);
        }
    }
}

fn serve(settings: Settings, shared: &Arc<Shared>, orders: &Arc<Orders<Order>>, early: Vec<Link>) {
    let failed = |why: &str| {
        Loss::new(
            "internal",
            format!("cannot be heard any more: internal error: {why}"),
        )
    };
    match Core::new(settings, Arc::clone(shared), Arc::clone(orders)) {
        Ok(mut core) => {
            let ran = catch_unwind(AssertUnwindSafe(|| core.run(early)));
            let loss = ran.err().map(|_| failed("the thread of the links has failed"));
            core.end(loss.as_ref());
        }
        Err(error) => {
            for link in early {
                let loss = failed(&error.to_string());
                shared.inbox.put(News::Gone(Arc::clone(&link.face), Some(loss)));
            }
        }
    }
}

fn ended(link: &Link, loss: &Loss) -> TalkError {
    TalkError::Ended(format!("{} {}", link.face.name, loss.reason))
}

fn flush_now(
    link: &mut Link,
    deadline: Instant,
    pending: &mut impl FnMut() -> bool,
) -> Result<(), TalkError> {
    loop {
        match link.flush() {
            Ok(false) => return Ok(()),
            Ok(true) => wait(link, PollFlags::OUT, deadline, pending)?,
            Err(fault) => return Err(ended(link, &fault.into())),
        }
    }
}

fn wait(
    link: &Link,
    flags: PollFlags,
    deadline: Instant,
    pending: &mut impl FnMut() -> bool,
) -> Result<(), TalkError> {
    let fd = match link.stream.write_fd() {
        Some(fd) if flags == PollFlags::OUT => fd,
        _ => link.stream.read_fd(),
    };
    loop {
        if pending() {
            return Err(TalkError::Interrupted);
        }
        let left = deadline.saturating_duration_since(Instant::now());
        let slice = left.min(SLICE);
        if poll_once(&[fd], flags, Some(slice)) == Ok(true) {
            return Ok(());
        }
        if left.is_zero() {
            return Err(TalkError::Ended(format!("{} does not answer", link.face.name)));
        }
    }
}
