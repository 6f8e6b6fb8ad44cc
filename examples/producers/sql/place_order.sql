-- psql "$DATABASE_URL" -v ON_ERROR_STOP=1 -v order=order-sql -f place_order.sql

begin;

insert into shop.orders (id, cents)
values (:'order', 9990);

insert into outbox.events (aggregatetype, aggregateid, event_type, payload)
values ('order', :'order', 'OrderPlaced', '{"cents": 9990}')
returning id;

commit;
