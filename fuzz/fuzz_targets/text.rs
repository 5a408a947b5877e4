#![no_main]

libfuzzer_sys::fuzz_target!(|input: &[u8]| csi_loopback_fuzz_targets::text(input));
