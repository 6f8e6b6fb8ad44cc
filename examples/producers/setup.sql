-- Creates what the examples need: a business table, and the role of the service that writes to it. Run
-- this script as a superuser in a database on which `postrider init --apply` has run.

create schema shop;
create table shop.orders (
    id    text   primary key,
    cents bigint  not null
);

create role shop_service login password 'secret';
grant usage on schema shop to shop_service;
grant insert on shop.orders to shop_service;

-- The service needs no other privilege on the outbox.
grant postrider_writer to shop_service;
