package penstock.kafka

import com.fasterxml.jackson.core.JsonProcessingException
import com.fasterxml.jackson.databind.{JsonNode, ObjectMapper}
import java.io.IOException
import java.net.{HttpURLConnection, URI, URLEncoder}
import java.nio.charset.StandardCharsets.UTF_8
import java.util.Base64
import javax.net.ssl.HttpsURLConnection
import scala.collection.mutable

/** Tokens of an OAuth token server (client credentials), shared by all clients of this Java: `services.core.security.oauth` in short.
  *
  * A token is used until shortly before its end. A server that failed is asked again HoldMs later. Thread-safe; waits for the server
  * up to twice TimeoutMs.
  */
private object Tokens {
  private case class Token(value: String, replaceAt: Long, endsAt: Long)
  private class Client(options: Map[String, String], val secret: String) {
    var token: Option[Token] = None
    var problem = ""
    var askAt = 0L
    var inBody = false

    private val tls = new TlsFiles(options.get("token_ca"), options.get("token_certificate"), options.get("token_key"))

    def get(): Token = {
      val now = System.currentTimeMillis
      token.filter(now < _.replaceAt).getOrElse {
        if (now >= askAt) refresh(now)
        token.filter(now < _.endsAt).getOrElse(throw new IOException(problem))
      }
    }

    private def refresh(now: Long): Unit =
      try {
        val first = ask(inBody)
        val maybeOtherWay = first._1 == 400 || first._1 == 401 // servers read id and secret in one place, or in both
        val (status, answer) = if (maybeOtherWay) ask(!inBody) else first
        if (maybeOtherWay && status / 100 == 2) inBody = !inBody
        token = Some(parse(if (maybeOtherWay && status / 100 != 2) first else status -> answer, now))
        problem = ""
      } catch {
        case error: IOException =>
          problem = s"no token from ${URI.create(options("token_url")).getAuthority}: ${error.getMessage}"
          askAt = now + HoldMs
      }

    private def ask(secretInBody: Boolean): (Int, JsonNode) = {
      val own = Seq("client_id" -> options("client_id"), "client_secret" -> secret)
      val wanted = Seq("scope", "audience", "resource").flatMap(name => options.get(name).map(name -> _))
      val fields = ("grant_type" -> "client_credentials") +: (wanted ++ (if (secretInBody) own else Nil))
      val body = fields.map { case (name, value) => s"$name=${encode(value)}" }.mkString("&").getBytes(UTF_8)
      val connection = URI.create(options("token_url")).toURL.openConnection().asInstanceOf[HttpURLConnection]
      connection match {
        case secure: HttpsURLConnection => secure.setSSLSocketFactory(tls.context().getSocketFactory)
        case _                          => ()
      }
      connection.setConnectTimeout(TimeoutMs)
      connection.setReadTimeout(TimeoutMs)
      connection.setInstanceFollowRedirects(false)
      connection.setDoOutput(true)
      connection.setRequestProperty("Accept", "application/json")
      if (!secretInBody) {
        val pair = own.map { case (_, value) => encode(value) }.mkString(":")
        connection.setRequestProperty("Authorization", s"Basic ${Base64.getEncoder.encodeToString(pair.getBytes(UTF_8))}")
      }
      try {
        connection.getOutputStream.write(body)
        val status = connection.getResponseCode
        val stream = Option(if (status < 400) connection.getInputStream else connection.getErrorStream)
        status -> read(stream.map(_.readNBytes(MostBytes)).getOrElse(Array.emptyByteArray))
      } finally connection.disconnect()
    }

    private def read(body: Array[Byte]): JsonNode =
      try Option(Json.readTree(body)).getOrElse(Json.createObjectNode)
      catch { case _: JsonProcessingException => Json.createObjectNode }

    /** The description of an error may quote the secret: only its code is told. */
    private def parse(found: (Int, JsonNode), now: Long): Token = {
      val (status, answer) = found
      val value = answer.path("access_token").asText("")
      if (status / 100 != 2) {
        val code = answer.path("error").asText("")
        throw new IOException(s"it answered $status${if (code.matches("[a-z_]{1,40}")) s" $code" else ""}")
      }
      if (value.isEmpty) throw new IOException("its answer has no access_token")
      val lifetime = Math.min(Math.max(answer.path("expires_in").asDouble(UnknownS), 0), LongestS) * 1000
      Token(value, now + (lifetime - Math.min(30_000, lifetime / 10)).toLong, now + lifetime.toLong)
    }
  }

  private val TimeoutMs, HoldMs = 5_000
  private val MostBytes = 65_536
  private val UnknownS = 3_600.0
  private val LongestS = 86_400.0
  private val Json = new ObjectMapper
  private val clients = mutable.Map.empty[Map[String, String], Client]

  /** The token, and when it ends. Throws IOException, whose text is for a person and has no secret. */
  def get(options: Map[String, String], secret: String): (String, Long) = synchronized {
    val client = clients.get(options).filter(_.secret == secret).getOrElse(new Client(options, secret))
    clients(options) = client
    val token = client.get()
    token.value -> token.endsAt
  }

  private def encode(text: String): String = URLEncoder.encode(text, UTF_8)
}
