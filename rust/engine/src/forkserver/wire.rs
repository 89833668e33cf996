//! Values as bytes, and bytes as values: each message names its fields once, in the order in which they are sent.
//!
//! Numbers are in the machine's byte order. What is not exactly one value is refused.

use std::ffi::CString;
use std::time::Duration;

/// What can be sent.
pub(crate) trait Wire: Sized {
    fn write(&self, out: &mut Vec<u8>);

    /// Takes a value from the front of the bytes.
    fn read(input: &mut &[u8]) -> Option<Self>;

    fn encode(&self) -> Vec<u8> {
        let mut out = Vec::new();
        self.write(&mut out);
        out
    }

    /// The value, if the bytes are that value and nothing more.
    fn decode(mut bytes: &[u8]) -> Option<Self> {
        let value = Self::read(&mut bytes)?;
        bytes.is_empty().then_some(value)
    }
}

/// Sends a struct as its fields, or an enum as a number and the fields of the variant.
macro_rules! wire {
    ($name:ident { $($field:tt),* $(,)? }) => {
        impl $crate::forkserver::wire::Wire for $name {
            fn write(&self, out: &mut Vec<u8>) {
                $(self.$field.write(out);)*
            }

            fn read(input: &mut &[u8]) -> Option<Self> {
                Some(Self { $($field: $crate::forkserver::wire::Wire::read(input)?),* })
            }
        }
    };
    ($name:ident { $($number:literal => $variant:ident { $($field:ident),* }),* $(,)? }) => {
        impl $crate::forkserver::wire::Wire for $name {
            fn write(&self, out: &mut Vec<u8>) {
                match self {
                    $(Self::$variant { $($field),* } => {
                        out.push($number);
                        $($field.write(out);)*
                    })*
                }
            }

            fn read(input: &mut &[u8]) -> Option<Self> {
                match <u8 as $crate::forkserver::wire::Wire>::read(input)? {
                    $($number => Some(Self::$variant {
                        $($field: $crate::forkserver::wire::Wire::read(input)?),*
                    }),)*
                    _ => None,
                }
            }
        }
    };
}
pub(crate) use wire;

macro_rules! numbers {
    ($($kind:ty),*) => {$(
        impl Wire for $kind {
            fn write(&self, out: &mut Vec<u8>) {
                out.extend(self.to_ne_bytes());
            }

            fn read(input: &mut &[u8]) -> Option<Self> {
                let (taken, rest) = input.split_first_chunk()?;
                *input = rest;
                Some(Self::from_ne_bytes(*taken))
            }
        }
    )*};
}
numbers!(u8, i32, u32, u64);

impl Wire for bool {
    fn write(&self, out: &mut Vec<u8>) {
        out.push(u8::from(*self));
    }

    fn read(input: &mut &[u8]) -> Option<Self> {
        match u8::read(input)? {
            0 => Some(false),
            1 => Some(true),
            _ => None,
        }
    }
}

impl<A: Wire, B: Wire> Wire for (A, B) {
    fn write(&self, out: &mut Vec<u8>) {
        self.0.write(out);
        self.1.write(out);
    }

    fn read(input: &mut &[u8]) -> Option<Self> {
        Some((A::read(input)?, B::read(input)?))
    }
}

impl Wire for Duration {
    fn write(&self, out: &mut Vec<u8>) {
        self.as_secs().write(out);
        self.subsec_nanos().write(out);
    }

    fn read(input: &mut &[u8]) -> Option<Self> {
        let seconds = u64::read(input)?;
        let nanoseconds = u32::read(input).filter(|&count| count < 1_000_000_000)?;
        Some(Self::new(seconds, nanoseconds))
    }
}

impl<T: Wire> Wire for Option<T> {
    fn write(&self, out: &mut Vec<u8>) {
        self.is_some().write(out);
        if let Some(value) = self {
            value.write(out);
        }
    }

    fn read(input: &mut &[u8]) -> Option<Self> {
        Some(if bool::read(input)? {
            Some(T::read(input)?)
        } else {
            None
        })
    }
}

impl<T: Wire, E: Wire> Wire for Result<T, E> {
    fn write(&self, out: &mut Vec<u8>) {
        self.is_err().write(out);
        match self {
            Ok(value) => value.write(out),
            Err(error) => error.write(out),
        }
    }

    fn read(input: &mut &[u8]) -> Option<Self> {
        Some(if bool::read(input)? {
            Err(E::read(input)?)
        } else {
            Ok(T::read(input)?)
        })
    }
}

impl<T: Wire> Wire for Vec<T> {
    fn write(&self, out: &mut Vec<u8>) {
        (self.len() as u64).write(out);
        for item in self {
            item.write(out);
        }
    }

    fn read(input: &mut &[u8]) -> Option<Self> {
        let count = u64::read(input)?;
        // Memory is not reserved in advance, because a wrong count could ask for any amount.
        let mut items = Self::new();
        for _ in 0..count {
            items.push(T::read(input)?);
        }
        Some(items)
    }
}

impl Wire for CString {
    fn write(&self, out: &mut Vec<u8>) {
        (self.count_bytes() as u64).write(out);
        out.extend(self.as_bytes());
    }

    fn read(input: &mut &[u8]) -> Option<Self> {
        let length = usize::try_from(u64::read(input)?).ok()?;
        let (text, rest) = input.split_at_checked(length)?;
        *input = rest;
        Self::new(text).ok()
    }
}
