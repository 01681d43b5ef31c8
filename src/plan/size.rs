//! Bytes as people write them.

/// Bytes in units of 1024, rounded to nearest.
pub fn size(bytes: u64) -> String {
    let (unit, name) = unit(bytes);
    let value = bytes as f64 / unit as f64;
    if value >= 100.0 || unit == 1 { format!("{value:.0}{name}") } else { format!("{value:.2}{name}") }
}

/// Bytes rounded up to a whole MiB: a `--memory` that is enough.
pub fn size_up(bytes: u64) -> String {
    format!("{}MiB", bytes.div_ceil(1 << 20))
}

fn unit(bytes: u64) -> (u64, &'static str) {
    [(1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")]
        .into_iter()
        .find(|(unit, _)| bytes >= *unit)
        .unwrap_or((1, "B"))
}
