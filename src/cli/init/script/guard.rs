//! The guard: statements that stop `init` if an untrusted role owns objects in the schema `outbox`, or
//! may create objects there. Otherwise `init` would run or reuse that role's objects as its own.

/// Refuses to run when an untrusted role owns the schema or anything in it, or may create objects there. Such
/// a role could attack the role that runs `init`: a statement on a table also runs the table's triggers, and
/// `if not exists` and `or replace` accept an object that is already there.
///
/// The guard runs before each migration, and again in the same transaction after the migration. The second
/// run is needed because another role might create an object between the two runs, in a transaction that
/// began while the role still had the right.
///
/// These roles are trusted: superusers, the owner of the database, the current role, and the roles whose rights
/// the current role inherits. If the current role is a superuser, inherited rights do not count: a superuser has
/// the rights of every role, so every role would be trusted.
pub(super) const GUARD_BODY: &str = "\
declare
    found record;
begin
    for found in
        with owned as (
            select n.oid as schema,
                   'Run this as role %s, or drop it, or give it to the owner of the database.' as hint
            from pg_catalog.pg_namespace n where n.nspname = 'outbox'
        )
        select o.what || coalesce(r.rolname, 'PUBLIC') as what,
               pg_catalog.format(o.hint, coalesce(pg_catalog.quote_ident(r.rolname), 'public')) as hint
        from (
            select 1 as place, n.nspowner as role, 'schema outbox belongs to role ' as what,
                   'Run this as role %s, or give the schema to the owner of the database.' as hint
            from pg_catalog.pg_namespace n where n.nspname = 'outbox'
            union all
            select 2, c.relowner, 'outbox.' || c.relname || ' belongs to role ', owned.hint
            from owned
            join pg_catalog.pg_class c on c.relnamespace = owned.schema and c.relkind not in ('i', 'I')
            union all
            select 2, p.proowner, 'function outbox.' || p.proname || ' belongs to role ', owned.hint
            from owned
            join pg_catalog.pg_proc p on p.pronamespace = owned.schema
            union all
            select 2, t.typowner, 'type outbox.' || t.typname || ' belongs to role ', owned.hint
            from owned
            join pg_catalog.pg_type t on t.typnamespace = owned.schema
            where t.typrelid = 0 and t.typelem = 0
            union all
            select 3, a.grantee, 'the right to create objects in schema outbox has role ',
                   'Revoke it: revoke create on schema outbox from %s.'
            from pg_catalog.pg_namespace n, pg_catalog.aclexplode(n.nspacl) a
            where n.nspname = 'outbox' and a.privilege_type = 'CREATE'
        ) o
        left join pg_catalog.pg_roles r on r.oid = o.role
        where r.oid is null
           or not r.rolsuper
          and r.rolname <> current_user
          and r.oid <> (select d.datdba from pg_catalog.pg_database d where d.datname = current_database())
          and ((select me.rolsuper from pg_catalog.pg_roles me where me.rolname = current_user)
               or not pg_catalog.pg_has_role(r.oid, 'usage'))
        order by o.place
    loop
        raise exception '%, which is not trusted', found.what
            using errcode = 'insufficient_privilege', hint = found.hint;
    end loop;
end
";

/// Returns [`GUARD_BODY`] as a statement.
pub(in crate::cli::init) fn guard() -> String {
    format!("do $$\n{GUARD_BODY}$$;\n")
}

/// Calls the guard in the printed script, which defines the guard once as a function of the session.
pub(super) const CALL_GUARD: &str = "do $$ begin perform pg_temp.postrider_guard(); end $$;\n";
