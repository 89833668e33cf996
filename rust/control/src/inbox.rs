//! What has arrived and is unread, and a bell that is rung while there is something.

use std::collections::VecDeque;
use std::sync::Arc;

use crate::face::Face;
use crate::frame::LONGEST_OF_AGENTS;
use crate::loss::Loss;
use crate::sync::{Bell, Mutex, MutexGuard, Ordering, PoisonError};

/// We do not read from a link while this many bytes of its messages are unread.
pub const UNREAD_BYTES: usize = LONGEST_OF_AGENTS;
/// The same limit for all links together: it pauses each link that sends beyond it.
pub const UNREAD_BYTES_OF_ALL: usize = 64 * UNREAD_BYTES;
/// Bytes that a message counts for in addition to its own.
const MESSAGE_COST: usize = 512;

/// Something that has arrived.
#[derive(Debug)]
pub enum News {
    /// A message of a link.
    Message(Arc<Face>, Vec<u8>),
    /// The end of a link, and why; `None`: we have ended it.
    Gone(Arc<Face>, Option<Loss>),
    /// A warning for the user.
    Warning(String),
    /// The same, about output that is lost.
    Lost(String),
}

/// A queue for any thread.
pub(crate) struct Inbox {
    pub(crate) bell: Bell,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    news: VecDeque<News>,
    bytes: usize,
}

impl State {
    fn note_read(&mut self, news: &News) -> Option<Arc<Face>> {
        let News::Message(face, payload) = news else {
            return None;
        };
        let size = payload.len() + MESSAGE_COST;
        self.bytes -= size;
        let left = face.unread.fetch_sub(size, Ordering::Relaxed) - size;
        (left == 0 && face.is_paused.swap(false, Ordering::SeqCst)).then(|| Arc::clone(face))
    }
}

impl Inbox {
    pub(crate) fn new(bell: Bell) -> Self {
        Self {
            bell,
            state: Mutex::default(),
        }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        // Each statement under the lock leaves the state consistent, so a panic does no harm.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Keeps news. A link with too many unread bytes is marked as paused.
    pub(crate) fn put(&self, news: News) {
        let mut state = self.lock();
        if let News::Message(face, payload) = &news {
            let size = payload.len() + MESSAGE_COST;
            state.bytes += size;
            let unread = face.unread.fetch_add(size, Ordering::Relaxed) + size;
            if unread >= UNREAD_BYTES || state.bytes >= UNREAD_BYTES_OF_ALL {
                face.is_paused.store(true, Ordering::SeqCst);
            }
        }
        // Nobody waits for the end of a link that we have ended.
        let is_silent = matches!(&news, News::Gone(_, None));
        state.news.push_back(news);
        if !is_silent {
            self.bell.ring();
        }
    }

    /// Takes all news, and the links whose pause is over.
    pub(crate) fn take(&self) -> (Vec<News>, Vec<Arc<Face>>) {
        let mut state = self.lock();
        self.bell.silence();
        let news: Vec<News> = std::mem::take(&mut state.news).into();
        let resumed = news.iter().filter_map(|one| state.note_read(one)).collect();
        (news, resumed)
    }

    /// Takes the first message of a link.
    pub(crate) fn take_first(&self, face: &Arc<Face>) -> Option<Vec<u8>> {
        let mut state = self.lock();
        let is_its = |news: &News| matches!(news, News::Message(whose, _) if Arc::ptr_eq(whose, face));
        let at = state.news.iter().position(is_its)?;
        let news = state.news.remove(at)?;
        state.note_read(&news);
        face.is_paused.store(false, Ordering::SeqCst);
        if state.news.is_empty() {
            self.bell.silence();
        }
        match news {
            News::Message(_, payload) => Some(payload),
            _ => None,
        }
    }

    /// Forgets the unread messages of a link.
    pub(crate) fn forget(&self, face: &Arc<Face>) {
        while self.take_first(face).is_some() {}
    }
}
