// Registers, serialises and reads with both clients, as their documentation shows. Arguments: the registry's URL. Prints JSON.

const assert = require("node:assert");
const { SchemaRegistryClient, AvroSerializer, AvroDeserializer, SerdeType, HeaderSchemaIdSerializer } = require("@confluentinc/schemaregistry");
const { SchemaRegistry, SchemaType } = require("@kafkajs/confluent-schema-registry");

const url = process.argv[2];
const order = { type: "record", name: "Order", namespace: "com.acme", fields: [{ name: "id", type: "long" }] };
const wider = { ...order, fields: [...order.fields, { name: "note", type: "string" }] };
const value = { id: 7 };

async function confluent() {
  const client = new SchemaRegistryClient({ baseURLs: [url], isForward: false });
  const id = await client.register("js-value", { schemaType: "AVRO", schema: JSON.stringify(order) });
  assert.deepStrictEqual(await client.getAllSubjects(), ["js-value"]);
  assert.deepStrictEqual(await client.getAllVersions("js-value"), [1]);
  assert.strictEqual((await client.getLatestSchemaMetadata("js-value")).id, id);
  assert.strictEqual(await client.testSubjectCompatibility("js-value", { schemaType: "AVRO", schema: JSON.stringify(wider) }), false);
  await assert.rejects(client.register("js-value", { schemaType: "AVRO", schema: JSON.stringify(wider) }), (error) => error.status === 409 && /note/.test(error.message));
  await assert.rejects(client.getLatestSchemaMetadata("none"), (error) => error.errorCode === 40401);
  const serializer = new AvroSerializer(client, SerdeType.VALUE, { autoRegisterSchemas: false, useLatestVersion: true });
  const bytes = await serializer.serialize("js", value);
  assert.strictEqual(bytes.readInt32BE(1), id);
  const deserializer = new AvroDeserializer(client, SerdeType.VALUE, {});
  assert.deepStrictEqual({ ...(await deserializer.deserialize("js", bytes)) }, value);
  const headers = {};
  const headed = new AvroSerializer(client, SerdeType.VALUE, { autoRegisterSchemas: false, useLatestVersion: true, schemaIdSerializer: HeaderSchemaIdSerializer });
  const bare = await headed.serialize("js", value, headers);
  assert.deepStrictEqual({ ...(await deserializer.deserialize("js", bare, headers)) }, value);
  return id;
}

async function kafkajs() {
  const registry = new SchemaRegistry({ host: url });
  const { id } = await registry.register({ type: SchemaType.AVRO, schema: JSON.stringify(order) }, { subject: "js-value" });
  const bytes = await registry.encode(id, value);
  assert.strictEqual(bytes[0], 0);
  assert.strictEqual(bytes.readInt32BE(1), id);
  assert.deepStrictEqual({ ...(await new SchemaRegistry({ host: url }).decode(bytes)) }, value);
  assert.strictEqual(await registry.getLatestSchemaId("js-value"), id);
  assert.strictEqual(await registry.getRegistryId("js-value", 1), id);
  await assert.rejects(registry.register({ type: SchemaType.AVRO, schema: JSON.stringify(wider) }, { subject: "js-value" }), /note/);
  await registry.register({ type: SchemaType.AVRO, schema: JSON.stringify({ ...order, name: "Own" }) }, { compatibility: "FULL", subject: "own" });
  return id;
}

(async () => {
  const ids = [await confluent(), await kafkajs()];
  console.log(JSON.stringify(ids));
})();
