//! Where the owner of a hub and its thread meet, in thousands of orders of their steps.
//!
//! The modules under test are compiled once more here, with locks and bells that a scheduler controls. If a thread is
//! never woken, the scheduler reports a deadlock.

#![expect(clippy::unwrap_used, reason = "a failed step fails the test")]
#![allow(dead_code, unreachable_pub, reason = "the crate uses what is not used here")]

use std::sync::Arc;

use shuttle::{check_pct, check_random, thread};

use dsl_control::credit::{FIRST_WINDOW, Leave, PIECE_COST, Treasury};
use dsl_control::frame::{Damaged, Frame, Ping};
use face::{Count, Counted, Face, Orders};
use inbox::{Inbox, News, UNREAD_BYTES, UNREAD_BYTES_OF_ALL};
use sync::{Bell, Ordering};

#[path = "../src/face.rs"]
mod face;
#[path = "../src/inbox.rs"]
mod inbox;

mod frame {
    pub(crate) use dsl_control::frame::{LONGEST_OF_AGENTS, Pong};
}
mod loss {
    pub(crate) use dsl_control::Loss;
}
mod outbox {
    pub(crate) use dsl_control::outbox::Outbox;
}

mod sync {
    pub(crate) use std::sync::PoisonError;

    pub(crate) use shuttle::sync::atomic::{AtomicBool, AtomicI64, AtomicUsize, Ordering};
    pub(crate) use shuttle::sync::{Condvar, Mutex, MutexGuard};

    /// A bell as the engine's: rung or not, however often it was rung.
    #[derive(Default)]
    pub(crate) struct Bell {
        is_rung: Mutex<bool>,
        rung: Condvar,
    }

    impl Bell {
        pub(crate) fn ring(&self) {
            *self.is_rung.lock().unwrap() = true;
            self.rung.notify_all();
        }

        pub(crate) fn silence(&self) -> bool {
            std::mem::take(&mut *self.is_rung.lock().unwrap())
        }

        pub(crate) fn is_rung(&self) -> bool {
            *self.is_rung.lock().unwrap()
        }

        /// What `poll` is to the other.
        pub(crate) fn wait(&self) {
            let is_rung = self
                .rung
                .wait_while(self.is_rung.lock().unwrap(), |is_rung| !*is_rung);
            drop(is_rung.unwrap());
        }
    }
}

/// Runs a test in random orders, and in orders that change the running thread only two or three times.
fn in_any_order(test: impl Fn() + Copy + Send + Sync + 'static) {
    check_random(test, 600);
    check_pct(test, 600, 3);
}

fn face(id: u64) -> Arc<Face> {
    Arc::new(Face::new(id, "n".into(), -1, None, String::new()))
}

fn message(face: &Arc<Face>, size: usize) -> News {
    News::Message(Arc::clone(face), vec![0; size])
}

/// What the owner may ask for besides attention.
enum Order {
    /// Begin to serve the link.
    Begin(Arc<Face>),
    Drain(Counted),
    Stop,
}

/// The owner's side and the thread's side of a hub, with one link whose connection takes everything.
struct Desk {
    bell: Arc<Bell>,
    orders: Orders<Order>,
    inbox: Inbox,
}

impl Desk {
    fn new() -> Arc<Self> {
        let bell = Arc::new(Bell::default());
        Arc::new(Self {
            orders: Orders::new(Arc::clone(&bell)),
            inbox: Inbox::new(Bell::default()),
            bell,
        })
    }

    /// Sends what a link has queued; returns whether it has ended.
    fn attend(face: &Face, wire: &mut Vec<u8>) -> bool {
        loop {
            let chunk = face.outbox().next_chunk(|| Ping { sent: 0, real: 0 }).bytes;
            if chunk.is_empty() {
                break;
            }
            wire.extend(chunk);
        }
        let has_ended = face.is_closing() && face.outbox().is_empty();
        if has_ended {
            face.outbox().shut();
        }
        has_ended
    }

    /// The thread: serves until it is told to stop, or the link has ended; returns what the connection got.
    fn serve(&self) -> Vec<u8> {
        let mut wire = Vec::new();
        let mut is_served = false;
        let mut is_over = false;
        while !is_over {
            self.bell.wait();
            let (orders, called) = self.orders.take();
            for order in orders {
                match order {
                    Order::Begin(face) => {
                        is_served = true;
                        is_over |= Self::attend(&face, &mut wire);
                    }
                    Order::Drain(waited_for) => drop(waited_for),
                    Order::Stop => is_over = true,
                }
            }
            for face in called.iter().filter(|_| is_served) {
                is_over |= Self::attend(face, &mut wire);
            }
        }
        self.orders.end();
        wire
    }
}

/// The first bytes of the messages on a wire.
fn heard(wire: &[u8]) -> Vec<u8> {
    let mut found = Vec::new();
    let hear = |frame: Frame<'_>| -> Result<(), Damaged> {
        let Frame::Message(payload) = frame else {
            panic!("{frame:?}")
        };
        found.push(payload[0]);
        Ok(())
    };
    dsl_control::frame::Parser::new(100).feed(wire, hear).unwrap();
    found
}

#[test]
fn what_is_sent_before_the_end_of_a_link_arrives_once_and_in_order() {
    in_any_order(|| {
        let (desk, face) = (Desk::new(), face(1));
        let serving = thread::spawn({
            let desk = Arc::clone(&desk);
            move || desk.serve()
        });
        let sender = thread::spawn({
            let (desk, face) = (Arc::clone(&desk), Arc::clone(&face));
            move || {
                for number in 100..103 {
                    desk.orders.send(&face, &[number]);
                }
            }
        });
        desk.orders.send(&face, &[0]);
        desk.orders.give(Order::Begin(Arc::clone(&face)));
        desk.orders.send(&face, &[1]);
        desk.orders.send(&face, &[2]);
        desk.orders.close(&face);
        desk.orders.send(&face, &[3]); // not any more
        sender.join().unwrap();
        let (others, ours): (Vec<u8>, Vec<u8>) = heard(&serving.join().unwrap())
            .into_iter()
            .partition(|number| *number >= 100);
        assert_eq!(ours, [0, 1, 2]);
        // The other thread may be too late with its last messages.
        assert!([100, 101, 102].starts_with(&others), "{others:?}");
    });
}

#[test]
fn a_wait_for_the_thread_ends_when_the_thread_has_done_it_or_has_ended() {
    in_any_order(|| {
        let desk = Desk::new();
        let serving = thread::spawn({
            let desk = Arc::clone(&desk);
            move || desk.serve()
        });
        let waiting = thread::spawn({
            let desk = Arc::clone(&desk);
            move || {
                let unsent = Arc::default();
                desk.orders.give(Order::Drain(Counted::new(&unsent)));
                assert!(unsent.wait(None, || false));
            }
        });
        desk.orders.give(Order::Stop);
        waiting.join().unwrap();
        serving.join().unwrap();
    });
}

#[test]
fn a_drain_returns_when_the_last_piece_is_shown_and_not_before() {
    in_any_order(|| {
        let (unshown, written) = (Arc::new(Count::default()), Arc::new(sync::AtomicUsize::new(0)));
        for _ in 0..3 {
            unshown.add();
        }
        let writers: Vec<_> = [1, 2]
            .into_iter()
            .map(|share| {
                let (unshown, written) = (Arc::clone(&unshown), Arc::clone(&written));
                thread::spawn(move || {
                    for _ in 0..share {
                        written.fetch_add(1, Ordering::SeqCst);
                        unshown.take();
                    }
                })
            })
            .collect();
        assert!(unshown.wait(None, || false));
        assert_eq!(written.load(Ordering::SeqCst), 3);
        for writer in writers {
            writer.join().unwrap();
        }
    });
}

#[test]
fn a_reader_hears_of_all_news_and_a_link_that_it_has_read_goes_on() {
    const COUNT: usize = 4;
    in_any_order(|| {
        let (desk, face) = (Desk::new(), face(1));
        let thread = thread::spawn({
            let (desk, face) = (Arc::clone(&desk), Arc::clone(&face));
            move || {
                for size in 1..=COUNT {
                    desk.inbox.put(message(&face, size * UNREAD_BYTES / 2));
                    while face.is_paused() {
                        // As the thread: deaf until the reader has called.
                        desk.bell.wait();
                        desk.orders.take();
                    }
                }
                desk.inbox
                    .put(News::Gone(Arc::clone(&face), Some(dsl_control::Loss::closed())));
            }
        });
        let mut sizes = Vec::new();
        let mut is_gone = false;
        while !is_gone {
            desk.inbox.bell.wait();
            let (news, resumed) = desk.inbox.take();
            for one in news {
                match one {
                    News::Message(_, payload) => sizes.push(payload.len() * 2 / UNREAD_BYTES),
                    News::Gone(..) => is_gone = true,
                    News::Warning(_) | News::Lost(_) => {}
                }
            }
            for face in resumed {
                desk.orders.call(&face);
            }
        }
        assert_eq!(sizes, (1..=COUNT).collect::<Vec<_>>());
        assert_eq!(face.unread.load(Ordering::SeqCst), 0);
        thread.join().unwrap();
    });
}

#[test]
fn an_agent_never_sends_more_output_than_its_head_allows() {
    const LIMIT: usize = 8 << 10;
    const PIECES: usize = 12;
    in_any_order(|| {
        let (to_head, arrived) = shuttle::sync::mpsc::channel::<usize>();
        let (to_writer, written) = shuttle::sync::mpsc::channel::<usize>();
        let face = face(1);
        let granted = Arc::new(Bell::default());
        // The agent sends pieces of all sizes as soon as it may.
        let agent = thread::spawn({
            let (face, granted) = (Arc::clone(&face), Arc::clone(&granted));
            move || {
                let mut credit = 0;
                for at in 0..PIECES {
                    let size = at * 97;
                    while credit < size + PIECE_COST {
                        granted.wait();
                        granted.silence();
                        let chunk = face.outbox().next_chunk(|| Ping { sent: 0, real: 0 }).bytes;
                        let hear = |frame: Frame<'_>| -> Result<(), Damaged> {
                            let Frame::Credit(count) = frame else {
                                panic!("{frame:?}")
                            };
                            credit += count as usize;
                            Ok(())
                        };
                        dsl_control::frame::Parser::new(100).feed(&chunk, hear).unwrap();
                    }
                    credit -= size + PIECE_COST;
                    to_head.send(size).unwrap();
                }
            }
        });
        let writer = thread::spawn(move || while written.recv().is_ok() {});
        let (mut treasury, mut leave) = (Treasury::new(LIMIT), Leave::default());
        let grant = |treasury: &mut Treasury, leave: &mut Leave, most: usize| {
            let more = treasury.grant(leave, most, 2);
            assert!(treasury.granted <= LIMIT);
            face.outbox().owe(more);
            granted.ring();
        };
        grant(&mut treasury, &mut leave, FIRST_WINDOW);
        for _ in 0..PIECES {
            let size = arrived.recv().unwrap();
            assert!(Treasury::take(&mut leave, size), "more than it may");
            to_writer.send(size).unwrap();
            treasury.written(Some(&mut leave), size);
            grant(&mut treasury, &mut leave, LIMIT);
        }
        drop(to_writer);
        agent.join().unwrap();
        writer.join().unwrap();
        treasury.take_back(&mut leave);
        assert_eq!(treasury.granted, 0);
    });
}

/// Runs a test once.
fn once(test: impl Fn() + Send + Sync + 'static) {
    check_random(test, 1);
}

#[test]
fn messages_that_nobody_reads_are_bounded_over_all_links() {
    once(|| {
        let inbox = Inbox::new(Bell::default());
        let faces: Vec<_> = (0..200).map(face).collect();
        let mut kept = 0;
        for _ in 0..1000 {
            for face in faces.iter().filter(|face| !face.is_paused()) {
                inbox.put(message(face, 500_000));
                kept += 500_000;
            }
        }
        let bounds = UNREAD_BYTES_OF_ALL * 99 / 100..=UNREAD_BYTES_OF_ALL + 200 * 1_000_000;
        assert!(bounds.contains(&kept), "{kept}");
        let (news, resumed) = inbox.take();
        assert_eq!(news.len() * 500_000, kept);
        assert_eq!(resumed.len(), 200);
    });
}

#[test]
fn a_long_first_message_does_not_leave_its_link_deaf() {
    once(|| {
        let (inbox, face) = (Inbox::new(Bell::default()), face(1));
        inbox.put(message(&face, 2 * UNREAD_BYTES));
        assert!(face.is_paused());
        let first = inbox.take_first(&face);
        assert_eq!(first.map(|data| data.len()), Some(2 * UNREAD_BYTES));
        assert!(!face.is_paused());
        assert!(!inbox.bell.is_rung());
    });
}

#[test]
fn the_end_of_a_link_that_we_have_ended_wakes_nobody() {
    once(|| {
        let inbox = Inbox::new(Bell::default());
        inbox.put(News::Gone(face(1), None));
        assert!(!inbox.bell.is_rung());
        inbox.put(News::Warning("x".into()));
        assert!(inbox.bell.is_rung());
        assert_eq!(inbox.take().0.len(), 2);
        assert!(!inbox.bell.is_rung());
    });
}
