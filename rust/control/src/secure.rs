//! A session between two sides with the same key, after the [Noise protocol](https://noiseprotocol.org/noise.html).
//!
//! An attacker without the key can neither open a session nor read, change, repeat, reorder or invent its messages.
//! Each session has keys of its own: an attacker who learns the shared key later cannot read recorded sessions. The
//! only thing that the network can do unnoticed is end the connection, so a message that must arrive needs an
//! answer.

use snow::{Builder, HandshakeState, TransportState};
use thiserror::Error;

/// NN: neither side has a lasting key pair. psk0: the shared key protects every message, from the first on.
const PATTERN: &str = "Noise_NNpsk0_25519_AESGCM_BLAKE2s";
/// Both sides must agree on this: it names the link and its version.
const PROLOGUE: &[u8] = b"dsl control 1";
/// Bytes of the authentication tag that each message ends with.
const TAG_LEN: usize = 16;
/// A message of the handshake: a public key of 32 bytes and a tag.
const HANDSHAKE_LEN: usize = 32 + TAG_LEN;

/// Bytes of a shared key.
pub const KEY_LEN: usize = 32;
/// Bytes of the longest message of the protocol.
pub const MAX_MESSAGE: usize = 65535;
/// Bytes that one message can hold at most.
pub const MAX_PLAIN: usize = MAX_MESSAGE - TAG_LEN;

/// Why a session refuses a call.
#[derive(Debug, Error, PartialEq)]
#[expect(missing_docs, reason = "each message says what it is about")]
pub enum Error {
    #[error("a key has {KEY_LEN} bytes, not {0}")]
    KeyLength(usize),
    #[error("it is the other side's turn in the handshake")]
    TheirTurn,
    #[error("it is this side's turn in the handshake")]
    OurTurn,
    #[error("the handshake is over")]
    AlreadyReady,
    #[error("the handshake is not over")]
    NotReady,
    #[error("a message holds {MAX_PLAIN} bytes at most, not {0}")]
    TooLong(usize),
    #[error("the other side has another key, or its message was damaged on the way")]
    Handshake,
    #[error("a message was damaged, repeated, reordered or made by somebody else")]
    Damaged,
    #[error("the session has ended with an earlier error")]
    Broken,
    #[error("the protocol cannot go on: {0}")]
    Protocol(#[from] snow::Error),
}

/// Which side speaks first.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Role {
    /// Sends the first message of the handshake.
    Initiator,
    /// Answers it.
    Responder,
}

enum State {
    Handshake(Box<HandshakeState>),
    Ready(Box<TransportState>),
    Broken,
}

/// One side of an encrypted connection. What one side seals the other opens, in the same order.
///
/// A message that does not fit ends the session: every later call fails.
pub struct Session(State);

impl Session {
    /// A session before its handshake.
    pub fn new(key: &[u8], role: Role) -> Result<Self, Error> {
        let key: &[u8; KEY_LEN] = key.try_into().map_err(|_| Error::KeyLength(key.len()))?;
        let builder = Builder::new(PATTERN.parse()?)
            .prologue(PROLOGUE)
            .and_then(|builder| builder.psk(0, key))?;
        let state = match role {
            Role::Initiator => builder.build_initiator(),
            Role::Responder => builder.build_responder(),
        };
        Ok(Self(State::Handshake(Box::new(state?))))
    }

    /// Whether the handshake is over, so that messages can be sealed and opened.
    pub fn is_ready(&self) -> bool {
        matches!(self.0, State::Ready(_))
    }

    /// The next message of the handshake, to be sent to the other side.
    pub fn handshake(&mut self) -> Result<Vec<u8>, Error> {
        let state = self.in_handshake()?;
        if !state.is_my_turn() {
            return Err(Error::TheirTurn);
        }
        let mut message = vec![0; HANDSHAKE_LEN];
        let written = state.write_message(&[], &mut message)?;
        message.truncate(written);
        self.advance()?;
        Ok(message)
    }

    /// Takes the other side's next message of the handshake.
    pub fn read_handshake(&mut self, message: &[u8]) -> Result<(), Error> {
        let state = self.in_handshake()?;
        if state.is_my_turn() {
            return Err(Error::OurTurn);
        }
        // The buffer has no room for a payload: our handshake messages have none.
        if state.read_message(message, &mut []).is_err() {
            self.0 = State::Broken;
            return Err(Error::Handshake);
        }
        self.advance()
    }

    /// Bytes of the message that holds `plain` bytes.
    pub fn sealed_len(plain: usize) -> Result<usize, Error> {
        if plain > MAX_PLAIN {
            return Err(Error::TooLong(plain));
        }
        Ok(plain + TAG_LEN)
    }

    /// Writes the message that holds `plain`. The message has [`Self::sealed_len`] bytes.
    pub fn seal(&mut self, plain: &[u8], message: &mut [u8]) -> Result<(), Error> {
        let state = self.ready()?;
        Self::sealed_len(plain.len())?;
        state.write_message(plain, message)?;
        Ok(())
    }

    /// Bytes that a message of this length holds.
    pub fn opened_len(message: usize) -> usize {
        message.saturating_sub(TAG_LEN)
    }

    /// Writes what the other side's next message holds: [`Self::opened_len`] bytes.
    pub fn open(&mut self, message: &[u8], plain: &mut [u8]) -> Result<(), Error> {
        let state = self.ready()?;
        if state.read_message(message, plain).is_err() {
            self.0 = State::Broken;
            return Err(Error::Damaged);
        }
        Ok(())
    }

    fn in_handshake(&mut self) -> Result<&mut HandshakeState, Error> {
        match &mut self.0 {
            State::Handshake(state) => Ok(state),
            State::Ready(_) => Err(Error::AlreadyReady),
            State::Broken => Err(Error::Broken),
        }
    }

    fn ready(&mut self) -> Result<&mut TransportState, Error> {
        match &mut self.0 {
            State::Handshake(_) => Err(Error::NotReady),
            State::Ready(state) => Ok(state),
            State::Broken => Err(Error::Broken),
        }
    }

    /// Ends the handshake if its last message was exchanged.
    fn advance(&mut self) -> Result<(), Error> {
        self.0 = match std::mem::replace(&mut self.0, State::Broken) {
            State::Handshake(state) if state.is_handshake_finished() => {
                State::Ready(Box::new(state.into_transport_mode()?))
            }
            state => state,
        };
        Ok(())
    }
}

#[cfg(test)]
mod tests;
