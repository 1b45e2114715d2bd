package penstock.judge

import java.nio.charset.StandardCharsets.UTF_8
import java.nio.file.{Files, Paths}
import scala.jdk.CollectionConverters._
import org.apache.avro.{AvroRuntimeException, Protocol, Schema, SchemaCompatibility, SchemaNormalization}
import org.apache.avro.SchemaCompatibility.SchemaCompatibilityType.COMPATIBLE
import org.apache.avro.idl.IdlReader

/** Avro's own answers, for tests. Arguments: a file of questions, a file for the answers; one a line, parts divided by tabs.
 *
 *  `reads READER WRITER` → `true`, `false`, or `refused` where Avro throws;
 *  `forms SCHEMA` → the parsing form, its CRC-64 and its SHA-256;
 *  `json SCHEMA` → the schema as Avro writes it;  `protocol PROTOCOL` → likewise;
 *  `idl FILE` → the protocol or schema of an IDL file, as JSON.
 *  An answer `error: …` is the message of an exception.
 */
object Judge {
  def main(arguments: Array[String]): Unit = {
    val out = Files.newBufferedWriter(Paths.get(arguments(1)), UTF_8)
    val in = Files.newBufferedReader(Paths.get(arguments(0)), UTF_8)
    try in.lines().iterator().asScala.foreach { line =>
      out.write(answer(line.split("\t", -1)))
      out.write('\n')
    } finally {
      in.close()
      out.close()
    }
  }

  private def answer(question: Array[String]): String =
    try question(0) match {
      case "reads" => reads(schema(question(1)), schema(question(2)))
      case "forms" => forms(schema(question(1)))
      case "json" => schema(question(1)).toString
      case "protocol" => Protocol.parse(question(1)).toString
      case "idl" => idl(question(1))
    } catch {
      case error: RuntimeException => "error: " + String.valueOf(error.getMessage).replaceAll("\\s+", " ")
    }

  private def schema(text: String): Schema = new Schema.Parser().parse(text)

  private def reads(reader: Schema, writer: Schema): String =
    try {
      val found = SchemaCompatibility.checkReaderWriterCompatibility(reader, writer)
      String.valueOf(found.getType == COMPATIBLE)
    } catch {
      case _: AvroRuntimeException => "refused"
    }

  private def forms(schema: Schema): String = {
    val crc = java.lang.Long.toUnsignedString(SchemaNormalization.parsingFingerprint64(schema))
    val sha = SchemaNormalization.parsingFingerprint("SHA-256", schema).map(byte => f"$byte%02x").mkString
    Seq(SchemaNormalization.toParsingForm(schema), crc, sha).mkString("\t")
  }

  private def idl(path: String): String = {
    val file = new IdlReader().parse(Paths.get(path))
    if (file.getProtocol != null) file.getProtocol.toString
    else if (file.getMainSchema != null) file.getMainSchema.toString
    else file.getNamedSchemas.values.asScala.map(_.toString).mkString("[", ",", "]")
  }
}
