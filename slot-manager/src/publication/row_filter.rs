//! Whether the row filter of a publication is the one that we want.
//!
//! PostgreSQL shows an expression as it would write it: its own parentheses, casts and quotes, and
//! schemas only where they are needed. So both texts are taken apart into words. For our filters,
//! which are nothing but function calls with a fixed number of arguments, the words in their order
//! are the expression.

/// Whether both are the same expression, or both are none.
pub(super) fn is_same(found: Option<&str>, wanted: Option<&str>) -> bool {
    found.map(words) == wanted.map(words)
}

/// Names, numbers and operators; of casts and schemas only what could make a difference.
fn words(expression: &str) -> Vec<String> {
    let mut words = Vec::new();
    let mut word = String::new();
    let mut rest = expression.chars().peekable();
    while let Some(c) = rest.next() {
        match c {
            '"' => {
                word.push('"');
                loop {
                    match rest.next() {
                        None => break,
                        // A doubled one stands for one.
                        Some('"') if rest.next_if_eq(&'"').is_none() => break,
                        Some(c) => word.push(c),
                    }
                }
                word.push('"');
            }
            '(' | ')' | ',' => end(&mut word, &mut words),
            c if c.is_whitespace() => end(&mut word, &mut words),
            c => word.push(c.to_ascii_lowercase()),
        }
    }
    end(&mut word, &mut words);
    words
}

fn end(word: &mut String, words: &mut Vec<String>) {
    let ended = std::mem::take(word);
    let ended = ended.strip_prefix("pg_catalog.").unwrap_or(&ended);
    let bare = ended.trim_matches('"');
    let needs_no_quotes = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '_';
    match bare.chars().all(needs_no_quotes) {
        // How a varchar becomes a text, which changes nothing of its value.
        _ if ended == "::text" || ended.is_empty() => {}
        true => words.push(bare.to_owned()),
        false => words.push(ended.to_owned()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Shard, quoted_identifier};

    fn wanted(column: &str, type_oid: u32) -> String {
        let shard: Shard = "1/4".parse().expect("a shard");
        let sql = shard.share_sql(&quoted_identifier(column), type_oid);
        sql.expect("a type with a hash")
    }

    #[test]
    fn what_postgresql_shows_of_our_filter_is_our_filter() {
        for (column, type_oid, found) in [
            (
                "aggregateid",
                25,
                "(mod(int4and(COALESCE(hashtext(aggregateid), 0), 2147483647), 4) = 1)",
            ),
            (
                "aggregateid",
                1043,
                "(mod(int4and(COALESCE(hashtext((aggregateid)::text), 0), 2147483647), 4) = 1)",
            ),
            (
                "position",
                20,
                "(mod(int4and(COALESCE(hashint8(\"position\"), 0), 2147483647), 4) = 1)",
            ),
            (
                "A (b)\"::text",
                2950,
                "(pg_catalog.mod(int4and(COALESCE(uuid_hash(\"A (b)\"\"::text\"), 0), 2147483647), 4) = 1)",
            ),
        ] {
            assert!(
                is_same(Some(found), Some(&wanted(column, type_oid))),
                "{found}"
            );
        }
    }

    #[test]
    fn another_filter_is_another() {
        let ours = wanted("aggregateid", 25);
        for found in [
            "(mod(int4and(COALESCE(hashtext(aggregateid), 0), 2147483647), 4) = 2)",
            "(mod(int4and(COALESCE(hashtext(aggregateid), 0), 2147483647), 3) = 1)",
            "(mod(int4and(COALESCE(hashtext(\"Aggregateid\"), 0), 2147483647), 4) = 1)",
            "(mod(int4and(COALESCE(hashtext(aggregatetype), 0), 2147483647), 4) = 1)",
            "(mod(int4and(COALESCE(hashtext(aggregateid), 1), 2147483647), 4) = 1)",
            "(mod(int4and(COALESCE(mine.hashtext(aggregateid), 0), 2147483647), 4) = 1)",
            "(id > 7)",
        ] {
            assert!(!is_same(Some(found), Some(&ours)), "{found}");
        }
        assert!(!is_same(None, Some(&ours)) && !is_same(Some("(id > 7)"), None));
        assert!(is_same(None, None));
    }
}
