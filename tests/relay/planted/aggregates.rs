//! Aggregates that a stranger has planted with the names of PostgreSQL's own aggregates and window functions.
//! A stranger cannot create a window function. But if a query calls a window function, PostgreSQL may call
//! an aggregate of that name instead.

/// SQL that plants the aggregates. Runs after the `PLANT` of the parent module. The transition function and the final
/// function of each aggregate count their calls. PostgreSQL calls the final function even if the aggregate reads no
/// row, so the test notices every use of a planted aggregate.
pub(super) const PLANT: &str = r#"
CREATE FUNCTION evil.last(text) RETURNS text LANGUAGE plpgsql SET search_path = pg_catalog AS
    'BEGIN PERFORM evil.trap(); END';
DO $plant$
DECLARE
    -- Pairs of argument types, as above.
    variants text[][] := ARRAY[['', ''], ['text', 'name'], ['text', 'varchar'], ['integer', 'bigint'],
        ['bigint', 'integer'], ['bigint', 'smallint'], ['numeric', 'bigint'], ['boolean', 'text'],
        ['anyelement', 'text'], ['anynonarray', 'text'], ['anyarray', 'text[]'], ['"any"', 'text'],
        ['anycompatible', 'text'], ['timestamp with time zone', 'timestamp'], ['pg_lsn', 'text']];
    v int; home text; f record; changed text[]; planted int := 0;
BEGIN
    FOR f IN
        SELECT p.proname::text AS name, coalesce((SELECT array_agg(format_type(t, NULL) ORDER BY n)
                   FROM unnest(p.proargtypes::oid[]) WITH ORDINALITY a (t, n)), '{}') AS types
        FROM pg_proc p WHERE p.pronamespace = 'pg_catalog'::regnamespace AND p.prokind IN ('a', 'w')
    LOOP
        FOR v IN 1 .. array_length(variants, 1) LOOP
            changed := CASE WHEN v = 1 THEN f.types
                            ELSE array_replace(f.types, variants[v][1], variants[v][2]) END;
            CONTINUE WHEN v > 1 AND changed = f.types;
            FOREACH home IN ARRAY ARRAY['evil', 'public'] LOOP
                BEGIN
                    EXECUTE format('CREATE FUNCTION evil.%I(%s) RETURNS text LANGUAGE plpgsql
                        SET search_path = pg_catalog AS ''BEGIN PERFORM evil.trap(); END''',
                        'next_' || planted, array_to_string('text'::text || changed, ', '));
                    EXECUTE format('CREATE AGGREGATE %I.%I(%s)
                        (SFUNC = evil.%I, STYPE = text, FINALFUNC = evil.last)', home, f.name,
                        CASE WHEN changed = '{}' THEN '*' ELSE array_to_string(changed, ', ') END,
                        'next_' || planted);
                    planted := planted + 1;
                EXCEPTION WHEN OTHERS THEN
                    NULL; -- no aggregate can have these argument types
                END;
            END LOOP;
        END LOOP;
    END LOOP;
    IF planted < 300 THEN
        RAISE EXCEPTION 'only % aggregates are planted', planted;
    END IF;
END
$plant$;
"#;
