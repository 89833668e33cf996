//! The random name of a job.

use std::fmt::Write;

/// 128 random bits in hexadecimal.
pub(crate) fn random() -> String {
    let mut bytes = [0u8; 16];
    // The flag-less call on a buffer this small neither fails nor returns short once the pool is seeded.
    let _ = rustix::rand::getrandom(&mut bytes, rustix::rand::GetRandomFlags::empty());
    bytes.iter().fold(String::new(), |mut text, byte| {
        let _ = write!(text, "{byte:02x}");
        text
    })
}
