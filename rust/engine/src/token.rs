//! The token of a job: its random name.

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

/// Whether a text has the form of a token.
pub(crate) fn is_one(text: &str) -> bool {
    text.len() == 32 && text.bytes().all(|byte| matches!(byte, b'0'..=b'9' | b'a'..=b'f'))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_is_told_from_other_words() {
        assert!(is_one(&random()));
        for text in ["", "modem", &"A".repeat(32), &"a".repeat(31), &"g".repeat(32)] {
            assert!(!is_one(text), "{text}");
        }
    }
}
