//! The thread of a hub: waits for all connections at once, and watches their time limits.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use dsl_engine::Display;
use dsl_engine::os::duplicate;
use dsl_engine::poller::{Interest, Poller, Ready};
use dsl_engine::spec::Console;
use rustix::io::Errno;

use crate::door::{Admitted, Door, Listener};
use crate::face::{Counted, Face, Orders};
use crate::frame::{Frame, LONGEST_OF_AGENTS};
use crate::inbox::News;
use crate::link::{
    BELL, CALLER, House, LINK, LISTENER, Link, PIPE, Shared, WRITER, flush, is_write_end_broken, last_words,
    token,
};
use crate::loss::{Fault, Loss, seconds, words};
use crate::relay::{Pipe, Relay};

/// Readings of a pipe in one turn of a drain.
const DRAIN_READS: usize = 64;

/// How a hub behaves.
#[derive(Debug, Clone)]
pub struct Settings {
    /// Silence after which the other side counts as lost.
    pub heartbeat: Duration,
    /// A head: the descriptors on which it shows what its agents send.
    pub console: Option<(i32, i32)>,
    /// A head: the message for a second agent of a place.
    pub taken: Vec<u8>,
}

/// What the owner asks the thread for. With a [`Counted`], the owner waits until the thread has done it or dropped it.
pub(crate) enum Order {
    Begin(Box<Link>),
    Listen(Listener),
    Unlisten(u16, Counted),
    Expect(Option<u32>, Vec<u8>, usize),
    Relay(Box<Relay>),
    Drain(Counted),
    /// End a link at once; whether it counts as that of a stranger.
    Drop(Arc<Face>, bool),
    Close,
    Stop,
}

/// Everything that the thread owns.
pub(crate) struct Core {
    settings: Settings,
    orders: Arc<Orders<Order>>,
    house: House,
    poller: Arc<Poller>,
    links: HashMap<u64, Link>,
    door: Door,
    relay: Option<Relay>,
    /// Their owners wait until the relay is empty.
    drains: Vec<Counted>,
    pause: Duration,
    tick: Instant,
    seen: Instant,
    is_stopped: bool,
}

impl Core {
    pub(crate) fn new(
        settings: Settings,
        shared: Arc<Shared>,
        orders: Arc<Orders<Order>>,
    ) -> Result<Self, dsl_engine::Error> {
        let is_head = settings.console.is_some();
        let mut house = House::new(is_head, shared);
        if let Some((stdout, stderr)) = settings.console {
            let display = Display::new(duplicate(stdout), duplicate(stderr), &house.shared.bell);
            let _ = house.shared.recent.set(display.recent());
            let _ = house.shared.tee.set(display.tee());
            house.display = Some(display);
        }
        let poller = Arc::new(Poller::new()?);
        poller.watch(&*house.shared.bell, BELL)?;
        // An agent answers the heartbeats of its head, and sends its own only if none come.
        let pause = settings.heartbeat / if is_head { 4 } else { 3 };
        let now = Instant::now();
        Ok(Self {
            settings,
            orders,
            door: Door::new(Arc::clone(&house.shared), Arc::clone(&poller)),
            house,
            poller,
            links: HashMap::new(),
            relay: None,
            drains: Vec::new(),
            pause,
            tick: now,
            seen: now,
            is_stopped: false,
        })
    }

    /// Serves until the end.
    pub(crate) fn run(&mut self, early: Vec<Link>) {
        for link in early {
            self.begin(link);
        }
        while !self.is_stopped {
            self.turn();
        }
    }

    fn turn(&mut self) {
        let now = Instant::now();
        let due = self.door.due().map_or(self.tick, |due| due.min(self.tick));
        let pause = due.saturating_duration_since(now);
        // Fails only if memory is short; then the loop looks again.
        let ready = self.poller.wait_ready(Some(pause)).unwrap_or_default();
        for one in ready {
            self.serve(one);
        }
        let now = Instant::now();
        if now.duration_since(self.seen).saturating_sub(pause) > self.pause {
            self.forgive(now);
        }
        if now >= self.tick {
            self.check_times(now);
        }
        self.door.expire(now);
        self.serve_relay();
        self.serve_display();
        self.seen = now;
    }

    fn serve(&mut self, ready: Ready) {
        let id = ready.token >> 3;
        match ready.token & 7 {
            _ if ready.token == BELL => self.hear_bell(),
            LISTENER => {
                for caller in self.door.accept(id) {
                    // A caller that waited to be accepted may have sent something already.
                    self.hear_caller(caller);
                    self.door.thin_out();
                }
            }
            CALLER => {
                self.hear_caller(id);
                self.door.thin_out();
            }
            LINK => self.attend(id, ready.is_readable || ready.is_broken),
            WRITER => {
                let is_broken = ready.is_broken && self.links.get(&id).is_some_and(is_write_end_broken);
                if is_broken {
                    self.fail(id, Errno::PIPE.into());
                } else {
                    self.attend(id, false);
                }
            }
            PIPE => self.pump(id as usize),
            _ => {}
        }
    }

    fn hear_bell(&mut self) {
        let (orders, called) = self.orders.take();
        for order in orders {
            self.obey(order);
        }
        for face in called {
            self.attend(face.id, false);
        }
    }

    fn obey(&mut self, order: Order) {
        match order {
            Order::Begin(link) => self.begin(*link),
            Order::Listen(listener) => self.door.open(listener),
            Order::Unlisten(port, waited_for) => {
                self.door.shut(port);
                drop(waited_for);
            }
            Order::Expect(place, key, count) => {
                self.door.expect(place, key, count);
                self.door.thin_out();
            }
            Order::Relay(relay) => self.relay = Some(*relay),
            Order::Drain(waited_for) => {
                if let Some(relay) = &mut self.relay {
                    relay.pipes.iter_mut().for_each(Pipe::owe);
                    self.drains.push(waited_for);
                }
            }
            Order::Drop(face, is_stranger) => {
                self.drop(face.id, None);
                if let (true, Some(origin)) = (is_stranger, &face.origin) {
                    self.door.warn_of(origin, None);
                }
            }
            Order::Close => self.close_links(),
            Order::Stop => self.is_stopped = true,
        }
    }

    // Links.

    /// Serves a link. Its silence counts from now on, because we may not have read from it before.
    fn begin(&mut self, mut link: Link) {
        let now = Instant::now();
        (link.last_heard, link.last_sent) = (now, now);
        let id = link.face.id;
        self.tick = self.tick.min(now + self.pause);
        let reading = Interest {
            read: true,
            write: false,
        };
        let mut result = self
            .poller
            .watch_for(link.stream.read_fd(), token(id, LINK), reading);
        if let Some(fd) = link.stream.write_fd() {
            let nothing = Interest::default();
            result = result.and(self.poller.watch_for(fd, token(id, WRITER), nothing));
        }
        self.links.insert(id, link);
        self.house.members = self.links.len();
        if result.is_err() {
            self.fail(id, Errno::BADF.into());
        } else {
            self.attend(id, false);
        }
    }

    /// Reads from a link if there is something, sends what is queued, and ends the link if its end was requested.
    fn attend(&mut self, id: u64, reads: bool) {
        let Some(link) = self.links.get_mut(&id) else {
            return;
        };
        let result = if reads {
            link.take(&mut self.house).map(drop)
        } else {
            Ok(())
        };
        match result.and_then(|()| flush(link, &self.poller)) {
            Ok(true) => {}
            Ok(false) => self.drop(id, None),
            Err(fault) => self.fail(id, fault),
        }
    }

    /// Ends a link because of an error.
    fn fail(&mut self, id: u64, fault: Fault) {
        let said = match (&fault, self.links.get_mut(&id)) {
            (Fault::Os(_), Some(link)) => last_words(link, &mut self.house),
            _ => None,
        };
        self.drop(id, Some(said.unwrap_or_else(|| fault.into())));
    }

    /// Ends a link. The reader of messages hears of a loss, unless we have closed the link.
    fn drop(&mut self, id: u64, loss: Option<Loss>) {
        let Some(mut link) = self.links.remove(&id) else {
            return;
        };
        self.house.members = self.links.len();
        link.face.is_lost.store(true, Ordering::SeqCst);
        link.face.outbox().shut();
        self.poller.forget(link.stream.read_fd());
        if let Some(fd) = link.stream.write_fd() {
            self.poller.forget(fd);
        }
        self.house.treasury.take_back(&mut link.leave);
        if let Some(display) = &mut self.house.display {
            display.end(id);
        }
        let is_wanted = !link.face.is_closing();
        let face = Arc::clone(&link.face);
        // Close the connection before we report its end.
        let counted = link.close();
        self.house
            .shared
            .inbox
            .put(News::Gone(face, loss.filter(|_| is_wanted)));
        drop(counted);
    }

    fn hear_caller(&mut self, id: u64) {
        if let Some(admitted) = self.door.read(id, &mut self.house.scratch) {
            self.admit(admitted);
        }
    }

    /// Makes a link of a connection that has shown that it knows the key.
    fn admit(&mut self, admitted: Admitted) {
        let Admitted {
            id,
            mut stream,
            origin,
            place,
            data,
        } = admitted;
        let place = i64::from(place);
        let is_its = |link: &Link| link.face.place() == place && !link.face.is_closing();
        let is_there = self.links.values().any(is_its);
        if is_there && origin.has_fixed_places() {
            let refusal = Frame::Message(&self.settings.taken).to_bytes();
            // If that fails, the agent does not learn why.
            let _ = stream.write(&refusal);
            let address = origin.address();
            self.house.shared.inbox.put(News::Warning(format!(
                "a second agent for place {place} has connected from {address} and was refused"
            )));
            return;
        }
        stream.tune(self.settings.heartbeat);
        let own_address = stream.own_address();
        let face = Arc::new(Face::new(id, origin.address(), place, Some(origin), own_address));
        let links = &self.house.shared.links;
        self.begin(Link::new(face, stream, LONGEST_OF_AGENTS, links));
        if let Some(link) = self.links.get_mut(&id) {
            match link.handle(&data, &mut self.house) {
                Ok(()) => self.attend(id, false),
                Err(fault) => self.fail(id, fault),
            }
        }
    }

    // Time.

    /// Gives links more time: we were stopped, or had no processor, and may not have read everything.
    fn forgive(&mut self, now: Instant) {
        let patience = self.settings.heartbeat.mul_f64(0.75);
        for link in self.links.values_mut() {
            let least = now.checked_sub(patience).unwrap_or(now);
            link.last_heard = link.last_heard.max(least);
            link.stuck_since = link.stuck_since.map(|_| now);
        }
        self.tick = now;
    }

    /// Sends heartbeats where we are silent, and ends links that are silent or take nothing.
    fn check_times(&mut self, now: Instant) {
        let heartbeat = self.settings.heartbeat;
        let time = seconds(heartbeat);
        let mut next = now + self.pause;
        let mut ended: Vec<(u64, Option<Loss>)> = Vec::new();
        let mut pinged = Vec::new();
        for (id, link) in &mut self.links {
            let heard_until = link.last_heard + heartbeat;
            let stuck_until = link.stuck_since.unwrap_or(now) + heartbeat;
            if link.is_finished {
                if link.linger_until <= now {
                    ended.push((*id, None));
                }
            } else if stuck_until <= now {
                let reason = format!("has taken nothing for {time}");
                ended.push((*id, Some(Loss::new("stuck", reason))));
            } else if !link.is_heard && self.house.is_head {
                // ssh may take long; the caller that started it limits that time.
            } else if heard_until <= now && !link.is_deaf {
                let reason = format!("has not been heard for {time}");
                ended.push((*id, Some(Loss::new("silent", reason))));
            } else {
                // While we do not read, silence proves nothing.
                let due = if link.is_deaf {
                    stuck_until
                } else {
                    heard_until.min(stuck_until)
                };
                next = next.min(due);
                let is_quiet = now.duration_since(link.last_sent) >= self.pause.mul_f64(0.9);
                let is_old = self.house.is_head && now.duration_since(link.last_measured) >= heartbeat;
                if is_quiet || is_old {
                    link.ping();
                    pinged.push(*id);
                }
            }
        }
        for (id, loss) in ended {
            self.drop(id, loss);
        }
        for id in pinged {
            self.attend(id, false);
        }
        self.tick = next;
    }

    // Output.

    fn pump(&mut self, at: usize) {
        if let Some(relay) = &mut self.relay {
            relay.pump(at, self.links.get_mut(&relay.link));
        }
    }

    fn serve_relay(&mut self) {
        let Some(relay) = &mut self.relay else { return };
        let id = relay.link;
        let is_draining = !self.drains.is_empty();
        if is_draining {
            for at in 0..2 {
                for _ in 0..DRAIN_READS {
                    if relay.pipes[at].owed == 0 || relay.room(at, self.links.get(&id)) == 0 {
                        break;
                    }
                    relay.pump(at, self.links.get_mut(&id));
                }
                if relay.pipes[at].owed == 0 {
                    relay.pipes[at].flush(self.links.get_mut(&id));
                }
            }
        }
        // What waits for room is sent when there is some.
        if self.links.get(&id).is_some_and(|link| !link.waits_to_write) {
            self.attend(id, false);
        }
        let Some(relay) = &mut self.relay else { return };
        let link = self.links.get(&id);
        if is_draining && relay.is_done(link) {
            self.drains.clear();
        }
        for at in 0..2 {
            let has_work = relay.room(at, link) > 0 || relay.is_full(at, link);
            // While we drain, a worker may write more, but we do not wait for that.
            let is_drained = is_draining && relay.pipes[at].owed == 0;
            let pipe = &mut relay.pipes[at];
            let wants = has_work && !pipe.is_ended && !is_drained;
            if wants && !pipe.is_watched {
                pipe.is_watched = self.poller.watch(&pipe.fd, token(at as u64, PIPE)).is_ok();
            } else if !wants && pipe.is_watched {
                self.poller.forget(&pipe.fd);
                pipe.is_watched = false;
            }
        }
    }

    fn serve_display(&mut self) {
        let Some(display) = &mut self.house.display else {
            return;
        };
        let progress = display.turn();
        for (console, errno, is_gone) in progress.failed {
            let name = if console == Console::Stderr {
                "stderr"
            } else {
                "stdout"
            };
            let why = words(&std::io::Error::from_raw_os_error(errno));
            self.house.shared.inbox.put(if is_gone {
                News::Warning(format!(
                    "{name} cannot be written ({why}): nothing more of the workers' output is shown there"
                ))
            } else {
                News::Lost(format!(
                    "cannot write {name}: {why}, the job goes on without what does not fit"
                ))
            });
        }
        let mut paid: Vec<u64> = Vec::new();
        for (id, count) in progress.taken {
            self.house.written(self.links.get_mut(&id), count);
            if paid.last() != Some(&id) {
                paid.push(id);
            }
        }
        paid.sort_unstable();
        paid.dedup();
        for id in paid {
            self.attend(id, false);
        }
    }

    // The end.

    fn close_links(&mut self) {
        let ids: Vec<u64> = self.links.keys().copied().collect();
        for id in ids {
            if let Some(link) = self.links.get(&id) {
                link.face.is_closing.store(true, Ordering::SeqCst);
                link.face.is_paused.store(false, Ordering::SeqCst);
            }
            self.attend(id, false);
        }
    }

    /// Ends everything. `loss`: why, if the thread has failed.
    pub(crate) fn end(&mut self, loss: Option<&Loss>) {
        let ids: Vec<u64> = self.links.keys().copied().collect();
        for id in ids {
            if let (None, Some(link)) = (loss, self.links.get(&id)) {
                link.face.is_closing.store(true, Ordering::SeqCst);
            }
            self.drop(id, loss.cloned());
        }
        self.drains.clear();
        self.door.close();
    }
}
