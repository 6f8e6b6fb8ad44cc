//! Recognises connection strings, which may contain a password.

/// Whether the text looks like a connection string: the URL of a PostgreSQL database, another URL with a
/// login, `user:password@host` without a scheme, or `name=value` pairs with a password.
///
/// If a setting for something else, such as a table, looks like this, somebody has put a connection string
/// into the wrong setting. The caller must refuse the value, because messages that show the setting would
/// show the password.
pub fn may_contain_password(text: &str) -> bool {
    let text = text.to_ascii_lowercase();
    has_password_pair(&text) || is_url_with_login(&text) || is_login_without_scheme(&text)
}

/// Whether `password` is followed by `=`, as in `host=h password = 'x'` and in the parameters of a URL.
fn has_password_pair(text: &str) -> bool {
    let mut rests = text.match_indices("password");
    rests.any(|(at, word)| text[at + word.len()..].trim_start().starts_with('='))
}

/// Whether the text is the URL of a PostgreSQL database, or another URL with a login. Every PostgreSQL URL
/// counts, even if no login is found in it. The URL may contain a password all the same, for example if the
/// author forgot the `@` after the password.
fn is_url_with_login(text: &str) -> bool {
    let Some((scheme, rest)) = text.split_once("://") else {
        return false;
    };
    let authority = rest.split(['/', '?', '#']).next().unwrap_or(rest);
    scheme.ends_with("postgres")
        || scheme.ends_with("postgresql")
        || authority.contains('@')
        || has_login(rest)
}

/// Whether the text has the form `user:password@host` without a scheme. Some texts do not count, because they contain
/// no password: texts that start with `mailto:`, `urn:` or `/`, which are usual values of the CloudEvents attribute
/// `source`, and names of tables such as `"my:schema"."events@1"`.
fn is_login_without_scheme(text: &str) -> bool {
    let is_source = ["mailto:", "urn:", "/"]
        .iter()
        .any(|start| text.starts_with(start));
    !is_source && !is_table_name(text) && !text.contains("://") && has_login(text)
}

/// Whether the text has the form `schema.table`, each part with or without quotes.
fn is_table_name(text: &str) -> bool {
    rest_after_name(text)
        .and_then(|rest| rest.strip_prefix('.'))
        .and_then(rest_after_name)
        .is_some_and(str::is_empty)
}

/// Returns the text after the SQL identifier at its beginning; `None` if there is none.
fn rest_after_name(text: &str) -> Option<&str> {
    let Some(mut quoted) = text.strip_prefix('"') else {
        let is_part = |c: char| c.is_alphanumeric() || c == '_' || c == '$';
        let rest = text.trim_start_matches(is_part);
        return (rest.len() < text.len()).then_some(rest);
    };
    loop {
        let (_, rest) = quoted.split_once('"')?;
        // Two quotes stand for one quote in the name.
        match rest.strip_prefix('"') {
            Some(more) => quoted = more,
            None => return Some(rest),
        }
    }
}

/// Whether the text has the form `user:password@host`.
fn has_login(text: &str) -> bool {
    text.rsplit_once('@')
        .is_some_and(|(login, _)| login.contains(':'))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn connection_strings_are_recognised() {
        for text in [
            "postgres://u:hunter2@h/d",
            "postgresql://u:hunter2@h:5432,i:5432/d?sslmode=require",
            "POSTGRES://u:hunter2@h/d",
            " postgres://u:hunter2@h/d",
            "jdbc:postgresql://h/d?user=u&password=hunter2",
            "postgres://u:hun/ter2@h/d",
            "postgres://u:hunter2",
            "postgres://h/d?PASSWORD=hunter2",
            "mysql://u:hunter2@h/d",
            "https://hunter2@h/d",
            "https://u:hun/ter2@h/d",
            "DATABASE_URL=postgres://u:hunter2@h/d",
            "host=h password=hunter2",
            "password = 'hunter2' host=h",
            "PGPASSWORD=hunter2",
            "u:hunter2@h/d",
            "\"u:hunter2@h\"",
            "\"u\".\"x\":hunter2@h",
        ] {
            assert!(may_contain_password(text), "{text}");
        }
    }

    #[test]
    fn names_templates_and_sources_are_not_recognised() {
        for text in [
            "",
            "outbox.events",
            "\"My Schema\".\"passwords\"",
            "\"my:schema\".\"events@1\"",
            "public.\"orders:v1@eu\"",
            "\"my:\"\"schema@1\".events",
            "shop.password",
            "postgres",
            "relay@shop",
            "shop.iam.gserviceaccount.com:x",
            "{aggregatetype}.events",
            "projects/example.com:shop-1/topics/{aggregatetype}",
            "bucketed(256)",
            "localhost:8085",
            "http://localhost:8085",
            "https://shop.example/outbox",
            "https://shop.example/@team",
            "mailto:team@shop.example",
            "mailto:team:one@shop.example",
            "urn:shop:orders",
            "urn:shop:team@company",
            "//shop/orders:v1@eu",
        ] {
            assert!(!may_contain_password(text), "{text}");
        }
    }
}
