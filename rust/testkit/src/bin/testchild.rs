//! A worker that does what its arguments say: see [`dsl_testkit::action`].
#![no_main]

/// Entry point called by the C library.
#[unsafe(no_mangle)]
pub extern "C" fn main(_argc: i32, _argv: *const *const u8) -> i32 {
    dsl_testkit::action::run(&dsl_testkit::arguments());
    0
}
