//! Formats figures as short text that fits into a column.

/// Formats a number with thousands separators, such as `12,345`.
pub(crate) fn grouped(number: u64) -> String {
    let digits = number.to_string();
    let mut text = String::with_capacity(digits.len() + digits.len() / 3);
    for (place, digit) in digits.chars().enumerate() {
        if place > 0 && (digits.len() - place).is_multiple_of(3) {
            text.push(',');
        }
        text.push(digit);
    }
    text
}

/// Formats a size: in bytes below 1,024 bytes, otherwise in kB. As in PostgreSQL, a kB has 1,024 bytes.
pub(crate) fn size(bytes: u64) -> String {
    if bytes < 1024 {
        format!("{bytes} B")
    } else {
        format!("{} kB", grouped(bytes / 1024))
    }
}

pub(crate) fn milliseconds(ms: f64) -> String {
    format!("{} ms", decimals(ms))
}

/// Formats a value with one decimal if it is below ten, otherwise without decimals.
fn decimals(value: f64) -> String {
    if value < 9.95 {
        format!("{value:.1}")
    } else {
        grouped(rounded(value))
    }
}

#[expect(
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    reason = "small and positive"
)]
pub(crate) fn rounded(value: f64) -> u64 {
    value.round() as u64
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_grouped_by_thousands() {
        for (number, text) in [
            (0, "0"),
            (999, "999"),
            (1_000, "1,000"),
            (12_345_678, "12,345,678"),
        ] {
            assert_eq!(grouped(number), text);
        }
    }

    #[test]
    fn small_times_have_a_decimal() {
        for (ms, text) in [
            (0.04, "0.0 ms"),
            (3.12, "3.1 ms"),
            (9.96, "10 ms"),
            (2_877.5, "2,878 ms"),
        ] {
            assert_eq!(milliseconds(ms), text);
        }
    }
}
